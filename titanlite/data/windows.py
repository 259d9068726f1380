"""The data set of a job: windows by sample number, in the job's order."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
from torch.utils.data import Dataset

from titanlite.config.job import Job
from titanlite.config.needs import is_streamed
from titanlite.config.schema import MixtureEntry
from titanlite.data.mixture import Mixture, identify
from titanlite.data.packing import Concatenated, Packed, blank
from titanlite.data.shuffle import SampleOrder
from titanlite.data.sources import DatasetPlace, Source, each_of, in_turn, open_source
from titanlite.data.stream import Stream, open_stream
from titanlite.data.tokenizer import Tokenizer, require_tokenizer
from titanlite.data.trained import Trained, WindowSource


class Windows(Dataset[np.ndarray]):
    """Windows of one source, or of a mixture of several; each source is shuffled again every epoch.

    Samples beyond the end (without `repeat`, or as padding of an uneven validation) are windows
    with all labels ignored, so that every rank can take part in every batch.
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
        self._sources = sources
        self._seq_len = seq_len
        self._rows = 4 if masked else 2
        self.repeat = repeat
        self.fingerprint = fingerprint
        self.each: Callable[..., None] = in_turn
        """Calls a function for the windows of a batch."""
        self._orders = [SampleOrder(source.samples, seed + n) for n, source in enumerate(sources)]
        self._mixture = Mixture(weights) if len(sources) > 1 else None
        self.samples = sum(source.samples for source in sources)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> np.ndarray:
        """Return a batch as one array (see MicroBatch); torch's data loader calls this name."""
        batch = np.empty((len(indices), self._rows, self._seq_len), dtype=np.int64)
        self.each(self._fill, batch, indices)
        return batch

    def _fill(self, out: np.ndarray, index: int) -> None:
        if not self.repeat and index >= self.samples:
            blank(out)
            return
        source = 0
        number = index
        if self._mixture:
            source, number = self._mixture(index)
        self._sources[source].fill(out, self._orders[source](number))


Opened = Mapping[DatasetPlace, Source]
"""Sources that are open already."""
NOTHING: Opened = MappingProxyType({})


def training_data(
    job: Job, tokenizer: Tokenizer | None, seed: int, opened: Opened = NOTHING
) -> Windows | Stream:
    """Open the data set or mixture of [training]."""
    training = job.config.training
    return _open(
        job, training.named_sources, training.seq_len, tokenizer, seed, training.repeat, opened
    )


def validation_data(
    job: Job, tokenizer: Tokenizer | None, opened: Opened = NOTHING
) -> Windows | Stream:
    """Open the data set of [validation].

    The seed of its order is fixed, so that n steps are the same windows on any mesh.
    """
    settings = job.config.validation
    source = MixtureEntry(dataset=settings.dataset, dataset_path=settings.dataset_path, weight=1.0)
    parts = [("validation", source)]
    data = _open(job, parts, job.validation_seq_len, tokenizer, 0, False, opened)
    if settings.steps != -1 and isinstance(data, Windows):
        data.samples = min(data.samples, settings.steps * settings.local_batch_size)
    return data


def _open(
    job: Job,
    parts: list[tuple[str, MixtureEntry]],
    seq_len: int,
    tokenizer: Tokenizer | None,
    seed: int,
    repeat: bool,
    opened: Opened,
) -> Windows | Stream:
    training = job.config.training
    masked = training.document_mask
    key, first = parts[0]
    if is_streamed(first.dataset):
        text_key = training.text_key
        name, shards = open_stream(key, first.dataset, first.dataset_path, text_key)
        tokenizer = require_tokenizer(tokenizer, f'{key}.dataset = "{first.dataset}"')
        return Stream(name, shards, tokenizer, seq_len, seed, masked, text_key)
    more = tokenizer, job.shape.vocab_size, training.text_key
    sources = []
    for key, part in parts:
        place = key, part.dataset, part.dataset_path
        sources.append(opened.get(place) or open_source(*place, *more))
    windows: list[WindowSource] = []
    for (key, part), source in zip(parts, sources, strict=True):
        if training.packing == "first-fit":
            windows.append(Packed(source, seq_len, key))
        else:
            windows.append(Concatenated(source, seq_len, masked, key))
        if part.dataset == "chat":
            windows[-1] = Trained(windows[-1])
    weights = tuple(part.weight for _, part in parts)
    data = Windows(
        windows,
        seq_len,
        seed,
        repeat=repeat,
        masked=masked,
        weights=weights,
        fingerprint=identify(sources, weights, seq_len, training.packing),
    )
    data.each = each_of(sources)
    return data
