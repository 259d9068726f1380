"""Stream a Hugging Face data set: the one kind of source that cannot be read at any offset.

Each reader (a loader worker of a data-parallel rank) reads its own documents, so their order
depends on the number of readers, and a resume needs the position of each: a few numbers and the
tokens left over.

- Every epoch has its own order of the data set's files ("shards" in `datasets`). Readers divide
  them as evenly as whole files allow; where several must read the same file, each takes every n-th
  document.
- A reader shuffles its documents in blocks, by a function of (seed, epoch, position), since the
  shuffle buffer of `datasets` is not part of its state. A resume reads the current block again and
  continues inside it.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, repeat
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from titanlite.config.rules.data import RETRIES
from titanlite.data.documents import require_folder, require_text, segments_of
from titanlite.data.fingerprint import fingerprint
from titanlite.data.packing import blank, fill
from titanlite.data.prefetch import Prefetcher
from titanlite.data.shuffle import RankSlice
from titanlite.data.tokenizer import Tokenizer
from titanlite.errors import RunFailed, UserError, first_line, install_command, print_notice
from titanlite.runtime.determinism import derive_seed

# A block with this much text ends, even with fewer than `Stream.block` documents.
BLOCK_CHARACTERS = 1 << 26
_STREAMS = {  # repository, configuration and split
    "c4": ("allenai/c4", "en", "train"),
    "c4_validation": ("allenai/c4", "en", "validation"),
    "c4_test": ("", "", "train"),  # TorchTitan's name for a local sample
}


@dataclass(frozen=True)
class Stream:
    """A streamed data set and how to cut windows from it; the same on all ranks."""

    name: str
    shards: Any  # a datasets.IterableDataset
    tokenizer: Tokenizer
    seq_len: int
    seed: int
    repeat: bool
    masked: bool = False
    stall_timeout: float = 10.0
    text_key: str = "text"
    pause: float = 1.0  # seconds before the first retry, doubled for each further one
    block: int = 4096  # documents that are shuffled together
    read: int = 256  # documents that are read at a time
    samples: None = field(default=None, init=False)  # the number of windows is unknown

    @property
    def fingerprint(self) -> str:
        """A hash of the data set's name and number of files, the tokenizer, and what else decides
        the windows.
        """
        parts = (
            self.name,
            self.shards.num_shards,
            self.tokenizer.fingerprint,
            self.seq_len,
            self.seed,
            *[self.text_key] * (self.text_key != "text"),
        )
        return fingerprint(" ".join(map(str, parts)))

    def blank_window(self) -> np.ndarray:
        """Return a window of padding."""
        out = np.empty((4 if self.masked else 2, self.seq_len), dtype=np.int64)
        blank(out)
        return out


def open_stream(key: str, name: str, path: str) -> tuple[str, Any]:
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
    if not path:
        _require_hub(key, setting)
    try:
        stream = datasets.load_dataset(path or repo, config or None, split=split, streaming=True)
    except Exception as error:  # the library raises all kinds
        setting += f' with dataset_path = "{path}"' if path else ""
        raise UserError(f"{setting} can't be streamed: {first_line(error)}") from None
    return f"{path or repo}{':' * bool(config)}{config}@{split}", stream


def _require_hub(key: str, setting: str) -> None:
    """Try the hub once: the library tries for half a minute before it reports that nothing
    answers.
    """
    from huggingface_hub import constants  # type: ignore[import-not-found]
    from huggingface_hub.utils import get_session  # type: ignore[import-not-found]

    try:
        if not constants.HF_HUB_OFFLINE:  # there is a cache
            get_session().head(constants.ENDPOINT, timeout=constants.DEFAULT_REQUEST_TIMEOUT)
    except Exception as error:  # of whichever library it uses for HTTP
        why = f"{constants.ENDPOINT} does not answer: {first_line(error)}"
        raise UserError(
            f"{setting} can't be streamed: {why}; {key}.dataset_path names a copy"
        ) from None


class Reader:
    """Windows of reader `number` of `readers`, from the beginning or from a state."""

    def __init__(self, stream: Stream, rank: int, number: int, readers: int, batch: int) -> None:
        self._stream = stream
        self._rank = rank
        self._number = number
        self._readers = readers
        self._batch = batch
        self._files = stream.shards.num_shards
        # Disjoint sets of files, each with as many readers.
        self._file_groups = math.gcd(self._files, readers)
        self._file_group = number % self._file_groups
        self._reader_in_group = number // self._file_groups
        self._readers_per_group = readers // self._file_groups
        start = {
            "epoch": 0,
            "file": 0,
            "document": 0,
            "taken": 0,
            "rest": [],
            "given": 0,
            "over": False,
        }
        self.load_state_dict(start)

    def state_dict(self) -> dict[str, Any]:
        """Return the block's start, how many of its documents were used, and the tokens not yet in
        a window.
        """
        state = dict(
            zip(("epoch", "file", "document"), self._block_start, strict=True),
            taken=self._documents_consumed,
        )
        rest = self._leftover_tokens.tolist()
        return {**state, "rest": rest, "given": self._windows_emitted, "over": self._exhausted}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state that a reader with the same number returned."""
        self._block_start = self._position = (state["epoch"], state["file"], state["document"])
        self._documents_consumed, self._windows_emitted = state["taken"], state["given"]
        self._leftover_tokens = np.asarray(state["rest"], dtype=np.int64)
        self._exhausted = state["over"]
        self._block: list[str] | None = None
        self._documents = self._read_epoch()

    def __iter__(self) -> Iterator[np.ndarray]:
        return self

    def __next__(self) -> np.ndarray:
        """Return a window.

        The last tokens are padded to a window, and the last windows to a batch.
        """
        stream = self._stream
        while len(self._leftover_tokens) <= stream.seq_len and not self._exhausted:
            self._take_document()
        if len(self._leftover_tokens) < 2 and self._windows_emitted % self._batch == 0:
            raise StopIteration
        self._windows_emitted += 1
        out = stream.blank_window()
        if len(self._leftover_tokens) >= 2:
            ended = partial(np.equal, stream.tokenizer.end)
            fill(out, self._leftover_tokens[: stream.seq_len + 1], ended)
            self._leftover_tokens = self._leftover_tokens[stream.seq_len :]
        return out

    def _take_document(self) -> None:
        """Append a document and its end token to the leftover tokens.

        At the epoch's end start the next, if any.
        """
        if self._block is None:
            self._block = self._read_block()
        if self._documents_consumed < len(self._block):
            tokenizer, text = self._stream.tokenizer, self._block[self._documents_consumed]
            ids = [tokenizer.encode(segment.text) for segment in segments_of(text)]
            ids = [self._leftover_tokens, *ids, [tokenizer.end]]
            self._leftover_tokens = np.concatenate(ids, dtype=np.int64)
            self._documents_consumed += 1
            return
        if self._block:
            self._block_start = self._position
        elif not self._stream.repeat:
            self._exhausted = True
        elif self._block_start[1:] == (0, 0):
            raise UserError(
                f"{self._description} has fewer documents than the {self._readers} readers "
                f"(ranks × workers); reader {self._number} has none"
            )
        else:
            self._block_start = self._position = (self._block_start[0] + 1, 0, 0)
            self._documents = self._read_epoch()
        self._block, self._documents_consumed = None, 0

    def _read_block(self) -> list[str]:
        """Return the next documents, shuffled; an empty list at the epoch's end."""
        block: list[str] = []
        size = 0
        for position, text in self._documents:
            self._position = position
            block.append(text)
            size += len(text)
            if len(block) == self._stream.block or size >= BLOCK_CHARACTERS:
                break
        order = np.random.default_rng(
            derive_seed("block", self._stream.seed, self._number, *self._block_start)
        )
        return [block[i] for i in order.permutation(len(block))]

    def _read_epoch(self) -> Iterator[tuple[tuple[int, int, int], str]]:
        """Yield this reader's documents from its position to the epoch's end, each with the
        position after it.
        """
        epoch, first_file, first_document = self._position
        order = np.random.default_rng(derive_seed("files", self._stream.seed, epoch)).permutation(
            self._files
        )
        files = order[self._file_group :: self._file_groups].tolist()
        for index in range(first_file, len(files)):
            for document, text in self._read_with_retries(files[index], first_document):
                yield (epoch, index, document + 1), text
            first_document = 0

    def _read_with_retries(self, file: int, first: int) -> Iterator[tuple[int, str]]:
        """Yield this reader's documents of a file from number `first` on.

        Retry a read that fails or stalls.
        """
        retries = 0
        while True:
            columns = Prefetcher(
                _text_columns(self._stream, file), depth=2, timeout=self._stream.stall_timeout
            )
            try:
                start = 0
                for texts in columns:
                    stop = start + len(texts)
                    begin = max(first, start)
                    begin += (self._reader_in_group - begin) % self._readers_per_group
                    for document in range(begin, stop, self._readers_per_group):
                        # Skip empty documents; a window of only end tokens would be taken for the
                        # data's end.
                        if text := texts[document - start].as_py():
                            yield document, text
                    if stop > first:
                        first, retries = stop, 0
                    start = stop
                return
            except UserError:
                raise
            # The network, the file system and the file format raise all kinds.
            except Exception as error:
                location = (
                    f"{self._description}, file {file + 1} of {self._files}, document {first}"
                )
                message = f"{location}: {first_line(error)}"
                if retries == RETRIES:
                    raise RunFailed(f"{message}; gave up after {RETRIES} retries") from None
                pause = self._stream.pause * 2**retries
                print_notice(f"{message}; retrying in {pause:g} s")
                time.sleep(pause)
                retries += 1
            finally:
                columns.stop()

    @property
    def _description(self) -> str:
        worker = f", worker {info.id}" if (info := get_worker_info()) else ""
        return f"stream {self._stream.name} of data-parallel rank {self._rank}{worker}"


def _text_columns(stream: Stream, file: int) -> Iterator[Any]:
    """Yield a file's texts as Arrow columns.

    (Plain iteration would divide the file among torch's workers again.)
    """
    from datasets.table import CastError  # type: ignore[import-not-found]
    from pyarrow import ArrowException  # type: ignore[import-not-found]

    shard = stream.shards.shard(stream.shards.num_shards, file)
    name = _file_name(shard) or f"{stream.name}, file {file + 1} of {stream.shards.num_shards}"
    why = f'; training.text_key = "{stream.text_key}" is the column of text'
    try:
        for table in shard.with_format("arrow").iter(batch_size=stream.read):
            require_text(name, table.schema, stream.text_key)
            yield table[stream.text_key]
    except CastError as error:
        columns = {*error.table_column_names} ^ {*error.requested_column_names}
        other = f"{name} and the first file differ in columns: {', '.join(sorted(columns))}"
        raise UserError(other + why) from None
    except (ArrowException, TypeError, UnicodeError) as error:  # another try would read the same
        raise UserError(f"{name} cannot be read: {first_line(error)}{why}") from None


def _file_name(shard: Any) -> str:
    """Return the file of a shard, which `datasets` has in no public place, or an empty string."""
    for value in getattr(shard._ex_iterable, "kwargs", {}).values():
        if value and isinstance(value, list) and isinstance(value[0], str):
            return value[0]
    return ""


class _RankStream(IterableDataset):
    """The part of a stream that one rank reads, divided among its workers."""

    def __init__(self, stream: Stream, rank_slice: RankSlice, workers: int) -> None:
        self._stream, self._rank_slice, self._workers = stream, rank_slice, max(1, workers)

    def __iter__(self) -> Reader:
        worker, rank_slice = get_worker_info(), self._rank_slice
        number = rank_slice.coordinate * self._workers + (worker.id if worker else 0)
        readers = rank_slice.ranks * self._workers
        return Reader(self._stream, rank_slice.coordinate, number, readers, rank_slice.local)


class StreamLoader:
    """Micro-batches of one rank: `steps` of them, or without end.

    After a rank's last document come batches of padding, because other ranks may still have data.
    The caller must detect that no rank has any left.
    """

    def __init__(
        self, stream: Stream, rank_slice: RankSlice, steps: int | None, options: dict[str, Any]
    ) -> None:
        self._stream, self._rank_slice, self.steps = stream, rank_slice, steps
        dataset = _RankStream(stream, rank_slice, options.get("num_workers", 0))
        self._loader = StatefulDataLoader(dataset, batch_size=rank_slice.local, **options)
        self._exhausted = self._resume_exhausted = False

    def __iter__(self) -> Iterator[np.ndarray]:
        self._exhausted, self._resume_exhausted = self._resume_exhausted, False
        return islice(self._batches(), self.steps)

    def _batches(self) -> Iterator[np.ndarray]:
        if not self._exhausted:
            yield from self._loader
            self._exhausted = True
        yield from repeat(np.stack([self._stream.blank_window()] * self._rank_slice.local))

    def _reader_identity(self) -> dict[str, Any]:
        return {
            "data": self._stream.fingerprint,
            "data-parallel degree": self._rank_slice.ranks,
            "data-parallel rank": self._rank_slice.coordinate,
            "training.dataloader.num_workers": self._loader.num_workers,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the position of every worker of this rank after the last batch."""
        loader = None if self._exhausted else self._loader.state_dict()
        return {**self._reader_identity(), "out": self._exhausted, "loader": loader}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state of the same rank with the same numbers of ranks and workers."""
        for key, value in self._reader_identity().items():
            if state[key] != value:
                raise UserError(
                    f"the stream {self._stream.name} can't continue: "
                    f"{key} was {state[key]} and is {value}. "
                    "Its position belongs to the ranks and workers that read it: "
                    "resume with as many, or prepare the data"
                )
        self._resume_exhausted = state["out"]  # a loader that has ended would start over
        if not self._resume_exhausted:
            self._loader.load_state_dict(state["loader"])
