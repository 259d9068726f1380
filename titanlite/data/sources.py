"""Where tokens come from: data sets by name, each one long stream of token ids read at any offset.

Nothing of the size of the data is built at start: bytes are read from the files as they are asked for, shards are
memory-mapped, and what a tokenizer.json makes of a text is prepared once, into a cache beside it.
"""

from __future__ import annotations

import bisect
import fcntl
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from titanlite.config.rules.data import STREAMS, is_streamed
from titanlite.data.documents import Documents, standard_library, text_files
from titanlite.data.prepare import prepare
from titanlite.data.shards import ShardSource
from titanlite.data.tokenizer import ByteTokenizer, Tokenizer
from titanlite.errors import UserError, first_line, nearest
from titanlite.runtime.cluster import cores

NAMES = ("python-stdlib", "python-stdlib-validation", "text", "tokens", *STREAMS)
_STREAMS = {
    "c4": ("allenai/c4", "en", "train"),
    "c4_validation": ("allenai/c4", "en", "validation"),
    "c4_test": ("", "", "train"),  # TorchTitan's name for a local sample
}
"""Repository, configuration and split."""


class Source(Protocol):
    """A stream of token ids, with an end token after each document."""

    tokens: int
    fingerprint: str
    end: int
    knows_ends: bool
    folder: Path
    """Where something may be cached beside the data."""

    def read(self, start: int, count: int) -> np.ndarray: ...

    def document_ends(self) -> np.ndarray: ...


def find_documents(key: str, name: str, path: str) -> Documents | None:
    """The documents of a data set, None for shards; `key` is the config section that asks for it."""
    if name in ("python-stdlib", "python-stdlib-validation"):
        return standard_library(held_out=name.endswith("-validation"))
    if name == "text":
        return text_files(f'{key}.dataset_path = "{path}"', path)
    if name == "tokens":
        return None
    close = nearest(name, NAMES)
    hint = f"; did you mean {close}?" if close else "."
    raise UserError(
        f'{key}.dataset = "{name}" is not a data set{hint} There are: {", ".join(NAMES)}, '
        "or a data set of the hub: OWNER/NAME"
    )


def validate_dataset(key: str, name: str, path: str, vocab_size: int) -> None:
    """Find what is wrong with a data set without preparing it."""
    if is_streamed(name):
        open_stream(key, name, path)
    elif find_documents(key, name, path) is None:
        ShardSource(key, Path(path), vocab_size, end=-1)


def open_source(key: str, name: str, path: str, tokenizer: Tokenizer, vocab_size: int) -> Source:
    """The token stream of a data set."""
    documents = find_documents(key, name, path)
    if documents is None:
        return ShardSource(key, Path(path), vocab_size, tokenizer.end)
    if isinstance(tokenizer, ByteTokenizer) and documents.are_plain:
        return ByteSource(documents, tokenizer)
    cache = cache_folder(documents.root) / f"{documents.fingerprint(tokenizer.fingerprint)}-{documents.state()}"
    with locked(cache):
        prepare({name: documents}, tokenizer.assets, cache, workers=cores())
    return ShardSource(key, cache, vocab_size, tokenizer.end)


def open_stream(key: str, name: str, path: str) -> tuple[str, Any]:
    """A data set by its name here or on the hub, NAME[:CONFIG][@SPLIT]; with a path, from that folder instead.

    Returns what was opened, for messages, and the `datasets.IterableDataset`.
    """
    try:
        import datasets  # type: ignore[import-not-found]
    except ImportError:
        raise UserError(
            f"{key}.dataset = \"{name}\": streaming needs datasets: pip install 'titanlite[hf]'"
        ) from None
    rest, _, split = name.partition("@")
    repo, _, config = rest.partition(":")
    repo, config, split = _STREAMS.get(name, (repo, config, split or "train"))
    if not path and not repo:
        raise UserError(f'{key}.dataset = "{name}" is a local sample of C4: name its folder in {key}.dataset_path')
    try:
        opened = datasets.load_dataset(path or repo, config or None, split=split, streaming=True)
    except Exception as error:  # the library raises all kinds
        asked = f'{key}.dataset = "{name}"' + (f' with dataset_path = "{path}"' if path else "")
        raise UserError(f"{asked} can't be streamed: {first_line(error)}") from None
    return f"{path or repo}{':' * bool(config)}{config}@{split}", opened


class ByteSource:
    """Bytes are tokens, so the files themselves are the stream."""

    knows_ends = True

    def __init__(self, documents: Documents, tokenizer: ByteTokenizer) -> None:
        self._documents, self.end, self.folder = documents, tokenizer.end, documents.root
        self._stops = list(itertools.accumulate(size + 1 for size in documents.sizes))
        self.tokens = self._stops[-1]
        self.fingerprint = documents.fingerprint(tokenizer.fingerprint)

    def document_ends(self) -> np.ndarray:
        return np.asarray(self._stops, dtype=np.int64)

    def read(self, start: int, count: int) -> np.ndarray:
        out = np.full(count, self.end, dtype=np.int64)
        at = 0
        document = bisect.bisect_right(self._stops, start)
        while at < count:
            size = self._documents.sizes[document]
            offset = start + at - (self._stops[document] - size - 1)
            length = min(size - offset, count - at)
            out[at : at + length] = self._bytes(document, offset, length)
            at += length + 1  # the end of the document
            document += 1
        return out

    def _bytes(self, document: int, offset: int, length: int) -> np.ndarray:
        path = self._documents.root / self._documents.names[document]
        try:
            with path.open("rb", buffering=0) as file:
                content = os.pread(file.fileno(), length, offset)
        except OSError as error:
            raise UserError(f"the data changed during the run: {path}: {error.strerror}") from None
        if len(content) != length:
            raise UserError(f"the data changed during the run: {path} is shorter than it was at the start")
        return np.frombuffer(content, dtype=np.uint8)


def cache_folder(root: Path) -> Path:
    """Beside the data, or in the user's cache where that can't be written."""
    fallback = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "titanlite"
    folder = root / ".titanlite" if os.access(root, os.W_OK) else fallback
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process makes a cache, the others wait; the lock goes with the process. On a disk without locks several may
    make it: they write the same bytes, and the first to finish publishes them."""
    with path.with_name(path.name + ".lock").open("w") as lock:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
