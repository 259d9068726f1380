"""The data set of a job: windows by sample number, in the job's order."""

import hashlib
from collections.abc import Sequence

import numpy as np
from torch.utils.data import Dataset

from titanlite.config.job import Job
from titanlite.config.rules.data import is_streamed
from titanlite.config.schema import Mixture as MixturePart
from titanlite.data.mixture import Mixture
from titanlite.data.packing import Concatenated, Packed, WindowSource, blank
from titanlite.data.shuffle import Order
from titanlite.data.sources import find_documents, open_source
from titanlite.data.stream import Stream, open_stream
from titanlite.data.tokenizer import Tokenizer, require_tokenizer


class Windows(Dataset[np.ndarray]):
    """Windows of one source, or of a mixture of several; each source is shuffled again every epoch.

    Samples beyond the end (without `repeat`, or the padding of an uneven validation) are windows whose labels are all
    ignored, so that every rank can take part in every batch.
    """

    def __init__(
        self,
        sources: list[WindowSource],
        seq_len: int,
        seed: int,
        *,
        repeat: bool,
        masked: bool = False,
        weights: tuple[float, ...] = (1.0,),
        fingerprint: str = "",
    ) -> None:
        self._sources, self._seq_len, self._rows = sources, seq_len, 4 if masked else 2
        self.repeat, self.fingerprint = repeat, fingerprint
        self._orders = [Order(source.samples, seed + number) for number, source in enumerate(sources)]
        self._mixture = Mixture(weights) if len(sources) > 1 else None
        self.samples = sum(source.samples for source in sources)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> np.ndarray:
        """Return a batch as one array (see MicroBatch); torch's data loader calls this name."""
        batch = np.empty((len(indices), self._rows, self._seq_len), dtype=np.int64)
        for out, index in zip(batch, indices, strict=True):
            if not self.repeat and index >= self.samples:
                blank(out)
                continue
            source, number = self._mixture(index) if self._mixture else (0, index)
            self._sources[source].fill(out, self._orders[source](number))
        return batch


def validate_dataset(key: str, name: str, path: str, vocab_size: int, tokenizer: Tokenizer | None) -> str:
    """Raise a UserError if a data set cannot be opened, without preparing it; return what to say about it, if any."""
    if is_streamed(name):
        open_stream(key, name, path)
    elif documents := find_documents(key, name, path):
        return documents.notice
    else:
        open_source(key, name, path, tokenizer, vocab_size)
    return ""


def training_data(job: Job, tokenizer: Tokenizer | None, seed: int) -> Windows | Stream:
    """Open the data set or mixture of [training]."""
    training = job.config.training
    return _open(job, "training", training.sources, training.seq_len, tokenizer, seed, training.repeat)


def validation_data(job: Job, tokenizer: Tokenizer | None) -> Windows | Stream:
    """Open the data set of [validation], in an order with a fixed seed: n steps are the same windows on any mesh."""
    settings = job.config.validation
    source = MixturePart(dataset=settings.dataset, dataset_path=settings.dataset_path, weight=1.0)
    data = _open(job, "validation", [source], job.validation_seq_len, tokenizer, seed=0, repeat=False)
    if settings.steps != -1 and isinstance(data, Windows):
        data.samples = min(data.samples, settings.steps * settings.local_batch_size)
    return data


def _open(
    job: Job, key: str, parts: list[MixturePart], seq_len: int, tokenizer: Tokenizer | None, seed: int, repeat: bool
) -> Windows | Stream:
    training, vocab_size = job.config.training, job.shape.vocab_size
    masked, stall_timeout = training.document_mask, training.dataloader.stall_timeout_seconds
    if is_streamed(dataset := parts[0].dataset):
        name, shards = open_stream(key, dataset, parts[0].dataset_path)
        tokenizer = require_tokenizer(tokenizer, f'{key}.dataset = "{dataset}"')
        return Stream(name, shards, tokenizer, seq_len, seed, repeat, masked, stall_timeout)
    sources = [open_source(key, part.dataset, part.dataset_path, tokenizer, vocab_size) for part in parts]
    if training.packing == "first-fit":
        windows: list[WindowSource] = [Packed(source, seq_len, key) for source in sources]
    else:
        windows = [Concatenated(source, seq_len, masked, key) for source in sources]
    weights = tuple(part.weight for part in parts)
    names, _, contents = zip(*(source.fingerprint.partition("+") for source in sources), strict=True)
    identity = " ".join(f"{name} {weight}" for name, weight in zip(names, weights, strict=True))
    fingerprint = hashlib.sha256(f"{identity} {seq_len} {training.packing}".encode()).hexdigest()[:16]
    fingerprint += "".join(f"+{content}" for content in contents if content)  # older checkpoints do not have it
    return Windows(windows, seq_len, seed, repeat=repeat, masked=masked, weights=weights, fingerprint=fingerprint)
