"""The data set of a job: windows by the job's sample number, in the job's order."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from torch.utils.data import Dataset

from titanlite.config.job import Job, validation_seq_len
from titanlite.config.rules.data import is_streamed
from titanlite.config.schema import Mixture as MixturePart
from titanlite.data.mixture import Mixture
from titanlite.data.packing import Concatenated, Cut, Packed, blank
from titanlite.data.shuffle import Order
from titanlite.data.sources import open_source, open_stream
from titanlite.data.stream import Stream
from titanlite.data.tokenizer import Tokenizer


class Windows(Dataset[np.ndarray]):
    """Windows of one source, or of several in the shares of a mixture, each source shuffled anew every epoch.

    Numbers beyond the end (without `repeat`, or the padding of an uneven validation) give windows whose labels are
    all ignored, so that every rank can take part in every batch.
    """

    def __init__(
        self,
        cuts: list[Cut],
        seq_len: int,
        seed: int,
        *,
        repeat: bool,
        masked: bool = False,
        weights: tuple[float, ...] = (1.0,),
        fingerprint: str = "",
    ) -> None:
        self._cuts, self._seq_len, self._rows = cuts, seq_len, 4 if masked else 2
        self.repeat, self.fingerprint = repeat, fingerprint
        self._orders = [Order(cut.samples, seed + number) for number, cut in enumerate(cuts)]
        self._mixture = Mixture(weights) if len(cuts) > 1 else None
        self.samples = sum(cut.samples for cut in cuts)

    def __getitem__(self, index: int) -> np.ndarray:
        """Tokens, labels, and under a document mask documents and positions."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> np.ndarray:
        """A batch in one piece; by this name torch's loader asks for it."""
        batch = np.empty((len(indices), self._rows, self._seq_len), dtype=np.int64)
        for out, index in zip(batch, indices, strict=True):
            if not self.repeat and index >= self.samples:
                blank(out)
                continue
            source, number = self._mixture(index) if self._mixture else (0, index)
            self._cuts[source].fill(out, self._orders[source](number))
        return batch

    def steps_left(self, consumed: int, per_step: int) -> int | None:
        """Steps that still have a sample; None for never-ending data."""
        return None if self.repeat else max(0, -(-(self.samples - consumed) // per_step))


def training_data(job: Job, tokenizer: Tokenizer, seed: int) -> Windows | Stream:
    """The training data."""
    training = job.config.training
    alone = MixturePart(dataset=training.dataset, dataset_path=training.dataset_path, weight=1.0)
    parts = training.mixture or [alone]
    return _open(job, "training", parts, training.seq_len, tokenizer, seed, training.repeat)


def validation_data(job: Job, tokenizer: Tokenizer) -> Windows | Stream:
    """The held-out data, in an order with a fixed seed, so that n steps are the same windows in every run."""
    validation = job.config.validation
    part = MixturePart(dataset=validation.dataset, dataset_path=validation.dataset_path, weight=1.0)
    return _open(job, "validation", [part], validation_seq_len(job.config), tokenizer, seed=0, repeat=False)


def _open(
    job: Job, key: str, parts: list[MixturePart], seq_len: int, tokenizer: Tokenizer, seed: int, repeat: bool
) -> Windows | Stream:
    training, vocab_size = job.config.training, job.shape.vocab_size
    if is_streamed(parts[0].dataset):
        name, shards = open_stream(key, parts[0].dataset, parts[0].dataset_path)
        patience = training.dataloader.stall_timeout_seconds
        return Stream(name, shards, tokenizer, seq_len, seed, repeat, training.document_mask, patience)
    sources = [open_source(key, part.dataset, part.dataset_path, tokenizer, vocab_size) for part in parts]
    masked, packed = training.document_mask, training.packing == "first-fit"
    cuts: list[Cut] = [
        Packed(source, seq_len, key) if packed else Concatenated(source, seq_len, masked, key) for source in sources
    ]
    weights = tuple(part.weight for part in parts)
    described = " ".join(f"{s.fingerprint} {w}" for s, w in zip(sources, weights, strict=True))
    fingerprint = hashlib.sha256(f"{described} {seq_len} {training.packing}".encode()).hexdigest()[:16]
    return Windows(cuts, seq_len, seed, repeat=repeat, masked=masked, weights=weights, fingerprint=fingerprint)
