"""Data sets of the Hugging Face hub, streamed: the one source that can't be read at any offset.

A reader (a loader worker of a data-parallel rank) has its own documents, so the order depends on how many readers
there are, and a resume needs the position that each had. It is three numbers and the tokens left over:

- Every epoch has its own order of the data set's files ("shards" to `datasets`). Readers share them as evenly as
  whole files go, and where several must read the same file, each keeps every n-th document.
- A reader shuffles its documents in blocks, each by a permutation that is a function of (seed, epoch, place). The
  shuffle buffer of `datasets` is not used: it isn't part of its state, so a resume would drop what it held.
- A resume reads the block that it was in once more, and goes on in it.

A read that fails or stalls is tried again from the document where it stood.
"""

from __future__ import annotations

import hashlib
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, islice, repeat
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from titanlite.config.rules.data import RETRIES
from titanlite.data.packing import blank, fill
from titanlite.data.prefetch import Prefetcher
from titanlite.data.shuffle import RankSlice
from titanlite.data.tokenizer import Tokenizer
from titanlite.errors import UserError, first_line
from titanlite.runtime.determinism import derive_seed

BLOCK_CHARACTERS = 1 << 26
"""A block is full with as much text, however few documents that is."""


@dataclass(frozen=True)
class Stream:
    """What is streamed, and how windows are cut from it; the same on all ranks."""

    name: str
    shards: Any
    """A `datasets.IterableDataset`."""
    tokenizer: Tokenizer
    seq_len: int
    seed: int
    repeat: bool
    masked: bool = False
    stall_timeout: float = 10.0
    pause: float = 1.0
    """Seconds before the first new try; each pause is twice the one before."""
    block: int = 4096
    """Documents that are shuffled at a time."""
    read: int = 256
    """Documents that are read at a time."""
    samples: None = field(default=None, init=False)
    """Nobody knows how many windows there are."""

    @property
    def fingerprint(self) -> str:
        """Changes with the data set's name and number of files, the tokenizer, and what else decides the windows."""
        what = (self.name, self.shards.num_shards, self.tokenizer.fingerprint, self.seq_len, self.seed)
        return hashlib.sha256(" ".join(map(str, what)).encode()).hexdigest()[:16]

    @property
    def rows(self) -> int:
        return 4 if self.masked else 2

    def empty(self) -> np.ndarray:
        """A window that does not count."""
        out = self.room()
        blank(out)
        return out

    def room(self) -> np.ndarray:
        """Memory for a window, not filled yet."""
        return np.empty((self.rows, self.seq_len), dtype=np.int64)


class Reader:
    """Windows of one reader, from the beginning or from a state."""

    def __init__(self, stream: Stream, rank: int, number: int, readers: int, batch: int) -> None:
        self._stream, self._rank, self._number, self._readers, self._batch = stream, rank, number, readers, batch
        self._files = stream.shards.num_shards
        lanes = math.gcd(self._files, readers)  # disjoint sets of files
        self._lane, self._lanes = number % lanes, lanes
        self._part, self._parts = number // lanes, readers // lanes
        self.load_state_dict(
            {"epoch": 0, "file": 0, "document": 0, "taken": 0, "rest": [], "given": 0, "over": False}
        )

    def state_dict(self) -> dict[str, Any]:
        """Where the block began, what was taken of it, and the tokens that no window has had yet."""
        epoch, file, document = self._began
        position = {"epoch": epoch, "file": file, "document": document, "taken": self._taken}
        return {**position, "rest": self._rest.tolist(), "given": self._given, "over": self._over}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._began = self._stands = (state["epoch"], state["file"], state["document"])
        self._taken, self._given, self._over = state["taken"], state["given"], state["over"]
        self._rest = np.asarray(state["rest"], dtype=np.int64)
        self._block: list[str] | None = None
        self._documents = self._epoch()

    def __iter__(self) -> Iterator[np.ndarray]:
        return self

    def __next__(self) -> np.ndarray:
        """Tokens, labels, and under a document mask documents and positions. At the end the rest, then as many
        windows that do not count as fill a batch."""
        stream = self._stream
        while len(self._rest) <= stream.seq_len and not self._over:
            self._take_document()
        if len(self._rest) < 2 and self._given % self._batch == 0:
            raise StopIteration
        self._given += 1
        if len(self._rest) < 2:
            return stream.empty()
        ids, self._rest = self._rest[: stream.seq_len + 1], self._rest[stream.seq_len :]
        out = stream.room()
        fill(out, ids, stream.tokenizer.end)
        return out

    def _take_document(self) -> None:
        """Put a document and the end after it behind the rest; at the epoch's end begin the next, if any."""
        if self._block is None:
            self._block = self._read_block()
        if self._taken < len(self._block):
            ids = np.asarray(self._stream.tokenizer.encode(self._block[self._taken]), dtype=np.int64)
            self._rest = np.concatenate([self._rest, ids, [self._stream.tokenizer.end]])
            self._taken += 1
            return
        if self._block:
            self._began = self._stands
        elif not self._stream.repeat:
            self._over = True
        elif self._began[1:] == (0, 0):
            raise UserError(f"{self._me}: fewer documents than its {self._readers} readers, and none for this one")
        else:
            self._began = self._stands = (self._began[0] + 1, 0, 0)
            self._documents = self._epoch()
        self._block, self._taken = None, 0

    def _read_block(self) -> list[str]:
        """The next documents in their shuffled order; none at the epoch's end."""
        block: list[str] = []
        size = 0
        for stands, text in self._documents:
            self._stands = stands
            block.append(text)
            size += len(text)
            if len(block) == self._stream.block or size >= BLOCK_CHARACTERS:
                break
        order = np.random.default_rng(derive_seed("block", self._stream.seed, self._number, *self._began))
        return [block[i] for i in order.permutation(len(block))]

    def _epoch(self) -> Iterator[tuple[tuple[int, int, int], str]]:
        """This reader's documents from where it stands to the epoch's end, each with the place behind it."""
        epoch, begin, first = self._stands
        order = np.random.default_rng(derive_seed("files", self._stream.seed, epoch)).permutation(self._files)
        files = order[self._lane :: self._lanes].tolist()
        for place in range(begin, len(files)):
            for document, text in self._patiently(files[place], first):
                yield (epoch, place, document + 1), text
            first = 0

    def _patiently(self, file: int, first: int) -> Iterator[tuple[int, str]]:
        """This reader's documents of a file from number `first` on; what fails or stalls is tried again."""
        tries = 0
        while True:
            reading = Prefetcher(_tables(self._stream, file), depth=2, timeout=self._stream.stall_timeout)
            try:
                at = 0
                for table in reading:
                    texts = _texts(self._stream.name, table)
                    mine = max(first, at) + (self._part - max(first, at)) % self._parts
                    for document in range(mine, at + len(texts), self._parts):
                        if text := texts[document - at].as_py():  # nothing but ends would look like the data's end
                            yield document, text
                    if at + len(texts) > first:
                        first, tries = at + len(texts), 0
                    at += len(texts)
                return
            except UserError:
                raise
            except Exception as error:  # whatever the network, the file system and the format come up with
                where = f"{self._me}, file {file + 1} of {self._files}, document {first}: "
                said = where + first_line(error)
                if tries == RETRIES:
                    raise UserError(f"{said}; gave up after {RETRIES} more tries") from None
                pause = self._stream.pause * 2**tries
                print(f"titanlite: {said}; trying again in {pause:g} s", file=sys.stderr, flush=True)
                time.sleep(pause)
                tries += 1
            finally:
                reading.stop()

    @property
    def _me(self) -> str:
        worker = get_worker_info()
        return f"the stream {self._stream.name} of data-parallel rank {self._rank}" + (
            f", worker {worker.id}" if worker else ""
        )


def _tables(stream: Stream, file: int) -> Iterator[Any]:
    """A file's documents as Arrow tables. (Plain iteration would share the file among torch's workers again.)"""
    one = stream.shards.shard(stream.shards.num_shards, file).with_format("arrow")
    yield from one.iter(batch_size=stream.read)


def _texts(name: str, table: Any) -> Any:
    if "text" not in table.column_names:
        raise UserError(f'{name} has no column "text"; it has: {", ".join(table.column_names)}')
    return table["text"]


class _Shared(IterableDataset):
    """A stream as the workers of a rank see it."""

    def __init__(self, stream: Stream, share: RankSlice, workers: int) -> None:
        self._stream, self._share, self._workers = stream, share, max(1, workers)

    def __iter__(self) -> Reader:
        worker = get_worker_info()
        share = self._share
        number = share.coordinate * self._workers + (worker.id if worker else 0)
        return Reader(self._stream, share.coordinate, number, share.ranks * self._workers, share.local)


class StreamLoader:
    """Micro-batches of one rank, `steps` of them or without end: after its last document a rank goes on with batches
    that do not count, until no rank has a token left. To notice that is for the one who reads."""

    def __init__(self, stream: Stream, share: RankSlice, steps: int | None, options: dict[str, Any]) -> None:
        self._stream, self._share, self._steps = stream, share, steps
        workers = options.get("num_workers", 0)
        self._loader = StatefulDataLoader(_Shared(stream, share, workers), batch_size=share.local, **options)
        self.num_workers, self.prefetch_factor = self._loader.num_workers, self._loader.prefetch_factor
        self.persistent_workers = self._loader.persistent_workers
        self._out = self._resume_out = False

    def __iter__(self) -> Iterator[np.ndarray]:
        filler = np.stack([self._stream.empty()] * self._share.local)
        self._out, self._resume_out = self._resume_out, False
        return islice(chain(() if self._out else self._loader, self._ended(), repeat(filler)), self._steps)

    def _ended(self) -> Iterator[np.ndarray]:
        self._out = True
        yield from ()

    def _owner(self) -> dict[str, Any]:
        return {
            "data": self._stream.fingerprint,
            "data-parallel degree": self._share.ranks,
            "data-parallel rank": self._share.coordinate,
            "training.dataloader.num_workers": self.num_workers,
        }

    def state_dict(self) -> dict[str, Any]:
        """Where every worker of this rank stands after the last batch; for this rank alone."""
        return {**self._owner(), "out": self._out, "loader": None if self._out else self._loader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state of the same rank among as many ranks and workers."""
        for what, mine in self._owner().items():
            if state[what] != mine:
                raise UserError(
                    f"the stream {self._stream.name} can't go on: {what} was {state[what]} and is {mine}. A stream's "
                    "position belongs to the ranks and workers that read it: resume with as many, or prepare the data"
                )
        self._resume_out = state["out"]  # a loader that has ended would begin anew
        if not self._resume_out:
            self._loader.load_state_dict(state["loader"])
