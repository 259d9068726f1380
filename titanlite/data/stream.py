"""Stream a Hugging Face data set: the only kind of source that cannot be read at any offset.

A reader (a loader worker of a data-parallel rank) reads the documents that `datasets` assigns to
it, so their order depends on the number of readers, and a resume needs each reader's position. A
reader shuffles its documents in blocks, as a function of the seed and the block's number, because
the shuffle buffer of `datasets` is not part of its state. A resume reads the current block again.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from titanlite.data.documents import require_folder, require_text, segments_of
from titanlite.data.fingerprint import fingerprint
from titanlite.data.packing import fill_window
from titanlite.data.shuffle import RankSlice
from titanlite.data.tokenizer import Tokenizer
from titanlite.errors import RunFailed, UserError, first_line, install_command
from titanlite.runtime.determinism import derive_seed

_STREAMS = {  # repository, configuration and split
    "c4": ("allenai/c4", "en", "train"),
    "c4_validation": ("allenai/c4", "en", "validation"),
    "c4_test": ("", "", "train"),  # TorchTitan's name for a local sample
}


@dataclass(frozen=True)
class Stream:
    """A streamed data set, which repeats, and how to cut it into windows; equal on all ranks."""

    name: str
    shards: Any  # a datasets.IterableDataset
    tokenizer: Tokenizer
    seq_len: int
    seed: int
    masked: bool = False
    text_key: str = "text"
    block: int = 1024  # documents that are shuffled together
    samples: None = field(default=None, init=False)  # the number of windows is unknown

    @property
    def fingerprint(self) -> str:
        """A hash of the data set's name, its number of files, the tokenizer, and everything else
        that determines the windows.
        """
        parts = (
            self.name,
            self.shards.num_shards,
            self.tokenizer.fingerprint,
            self.seq_len,
            self.seed,
            self.text_key,
        )
        return fingerprint(" ".join(map(str, parts)))


def open_stream(key: str, name: str, path: str, text_key: str = "text") -> tuple[str, Any]:
    """Open a streamed data set, NAME[:CONFIG][@SPLIT] on the hub, or the folder `path` if given.

    Return its full name, for messages, and the `datasets.IterableDataset`.
    """
    require_folder(key, path)
    setting = f'{key}.dataset = "{name}"'
    if name == "c4_test" and not path:
        raise UserError(f"{setting} is a local sample of C4: name its folder in {key}.dataset_path")
    try:
        import datasets  # type: ignore[import-not-found]
    except ImportError:
        raise UserError(
            f"{setting}: streaming needs datasets: {install_command('datasets')}"
        ) from None
    rest, _, split = name.partition("@")
    repo, _, config = rest.partition(":")
    repo, config, split = _STREAMS.get(name, (repo, config, split or "train"))
    if path:
        setting += f' with dataset_path = "{path}"'
    try:
        stream = datasets.load_dataset(path or repo, config or None, split=split, streaming=True)
    except Exception as error:  # the library raises all kinds of errors
        raise UserError(f"{setting} can't be streamed: {first_line(error)}") from None
    if stream.features:
        require_text(setting, stream.features.arrow_schema, text_key)
    parts = [path or repo]
    if config:
        parts.append(config)
    return f"{':'.join(parts)}@{split}", stream


class StreamReader:
    """The endless windows of reader `number` of `readers`, from the beginning or a state."""

    def __init__(self, stream: Stream, number: int, readers: int) -> None:
        self._stream = stream
        self._number = number
        self._readers = readers
        self.load_state_dict({"epoch": 0, "block": 0, "start": None, "taken": 0, "rest": []})

    def state_dict(self) -> dict[str, Any]:
        """Return the state of `datasets` at the beginning of the block, how many of its documents
        were used, and the tokens not yet in a window.
        """
        return {
            "epoch": self._epoch,
            "block": self._block,
            "start": self._start,
            "taken": self._taken,
            "rest": self._rest.tolist(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the state of a reader with the same number."""
        self._epoch = state["epoch"]
        self._block = state["block"]
        self._start = state["start"]
        self._taken = state["taken"]
        self._rest = np.asarray(state["rest"], dtype=np.int64)
        self._texts = self._read()

    def __iter__(self) -> Iterator[np.ndarray]:
        return self

    def __next__(self) -> np.ndarray:
        stream = self._stream
        end = stream.tokenizer.end
        while len(self._rest) <= stream.seq_len:
            ids = [stream.tokenizer.encode(part.text) for part in segments_of(next(self._texts))]
            self._rest = np.concatenate([self._rest, *ids, [end]], dtype=np.int64)
        rows = 4 if stream.masked else 2
        out = np.empty((rows, stream.seq_len), dtype=np.int64)
        fill_window(out, self._rest[: stream.seq_len + 1], partial(np.equal, end))
        self._rest = self._rest[stream.seq_len :]
        return out

    def _read(self) -> Iterator[str]:
        """Yield documents from the position on, epoch after epoch, and advance the position."""
        while True:
            found_any = self._start is not None
            for text in self._read_epoch():
                found_any = True
                yield text
            if not found_any:
                raise UserError(
                    f"{self._description} has fewer documents than the {self._readers} readers "
                    f"(ranks × workers); reader {self._number} has none"
                )
            self._epoch += 1
            self._start = None

    def _read_epoch(self) -> Iterator[str]:
        """Yield the documents from the position to the epoch's end."""
        from datasets.distributed import split_dataset_by_node  # type: ignore[import-not-found]

        stream = self._stream
        documents = split_dataset_by_node(stream.shards, self._number, self._readers)
        # The order of the files depends on this number; 0 would leave them in their own order.
        documents.set_epoch(1 + derive_seed("files", stream.seed, self._epoch) % 2**31)
        if self._start is not None:
            documents.load_state_dict(self._start)
        for block in self._explained(documents.iter(batch_size=stream.block)):
            texts = block[stream.text_key]
            seed = derive_seed("block", stream.seed, self._number, self._block)
            order = np.random.default_rng(seed).permutation(len(texts))
            for place in order[self._taken :]:
                self._taken += 1
                # Skip empty documents: a window of end tokens alone would train nothing.
                text = texts[place]
                if text:
                    yield text
            self._start = documents.state_dict()
            self._block += 1
            self._taken = 0

    def _explained(self, blocks: Iterator[dict[str, list[str]]]) -> Iterator[dict[str, list[str]]]:
        """Yield the blocks, and name the stream in an error."""
        try:
            yield from blocks
        except Exception as error:  # network, file system and format raise all kinds of errors
            why = " ".join(str(error).split())
            raise RunFailed(f"{self._description}: {type(error).__name__}: {why[:500]}") from None

    @property
    def _description(self) -> str:
        return f"stream {self._stream.name}, reader {self._number} of {self._readers}"


class _RankStream(IterableDataset):
    """One rank's part of a stream, divided among its workers."""

    def __init__(self, stream: Stream, rank_slice: RankSlice, workers: int) -> None:
        self._stream = stream
        self._rank_slice = rank_slice
        self._workers = max(1, workers)

    def __iter__(self) -> StreamReader:
        worker = get_worker_info()
        number = self._rank_slice.coordinate * self._workers
        if worker:
            number += worker.id
        return StreamReader(self._stream, number, self._rank_slice.ranks * self._workers)


class StreamLoader:
    """Micro-batches of one rank: `steps` of them, or endless."""

    def __init__(
        self, stream: Stream, rank_slice: RankSlice, steps: int | None, options: dict[str, Any]
    ) -> None:
        self._stream = stream
        self._rank_slice = rank_slice
        self.steps = steps
        dataset = _RankStream(stream, rank_slice, options.get("num_workers", 0))
        self._loader = StatefulDataLoader(dataset, batch_size=rank_slice.local, **options)

    def __iter__(self) -> Iterator[np.ndarray]:
        return islice(self._loader, self.steps)

    def _readers(self) -> dict[str, Any]:
        return {
            "data": self._stream.fingerprint,
            "data-parallel degree": self._rank_slice.ranks,
            "data-parallel rank": self._rank_slice.coordinate,
            "training.dataloader.num_workers": self._loader.num_workers,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the position of every worker of this rank after the last batch."""
        return {**self._readers(), "loader": self._loader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the state of the same rank, with the same numbers of ranks and workers."""
        for key, value in self._readers().items():
            if state[key] != value:
                raise UserError(
                    f"the stream {self._stream.name} can't continue: "
                    f"{key} was {state[key]} and is {value}. "
                    "Its position belongs to the ranks and workers that read it: "
                    "resume with as many, or prepare the data"
                )
        self._loader.load_state_dict(state["loader"])
