"""Where tokens come from: documents by name, and the token stream that they make.

A source is one long stream of token ids, an end-of-document id after each document, read at any offset. Nothing
of the size of the data is built at start: bytes are read from the files as they are asked for, and what a
tokenizer.json makes of a text is written once into a cache beside it and memory-mapped.
"""

from __future__ import annotations

import bisect
import fcntl
import hashlib
import itertools
import os
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from titanlite.data.tokenizer import ByteTokenizer, Tokenizer
from titanlite.errors import UserError

NAMES = ("python-stdlib", "python-stdlib-validation", "text")
HELD_OUT_EVERY = 25


class Source(Protocol):
    """A stream of token ids."""

    tokens: int
    fingerprint: str

    def read(self, start: int, count: int) -> np.ndarray: ...


@dataclass(frozen=True)
class Documents:
    """Files of text in a fixed order, by names that are the same on every machine."""

    root: Path
    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def fingerprint(self, tokenizer: Tokenizer) -> str:
        """Changes when a document is added, removed, renamed or resized, or the tokenizer is another."""
        parts = [tokenizer.fingerprint, *(f"{n}:{s}" for n, s in zip(self.names, self.sizes, strict=True))]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def find_documents(key: str, name: str, path: str) -> Documents:
    """The documents of a data set; `key` is the config section that asks for it."""
    if name in ("python-stdlib", "python-stdlib-validation"):
        root = Path(sysconfig.get_path("stdlib"))
        held_out = name.endswith("-validation")
        files = [f for i, f in enumerate(_standard_library(root)) if (i % HELD_OUT_EVERY == 0) == held_out]
    elif name == "text":
        root = Path(path)
        if root.is_file():
            files, root = [root], root.parent
        elif root.is_dir():
            files = sorted(root.rglob("*.txt"), key=lambda file: file.relative_to(root).as_posix())
        else:
            raise UserError(f'{key}.dataset_path = "{path}": there is no such folder or file')
    else:
        raise UserError(f'{key}.dataset = "{name}" is not a data set that is built in; there are: {", ".join(NAMES)}')
    sizes = tuple(file.stat().st_size for file in files)
    if not sum(sizes):
        what = f'{key}.dataset_path = "{path}"' if path else f'{key}.dataset = "{name}"'
        raise UserError(f"{what}: no text there" + (" (looked for .txt files)" if path else ""))
    return Documents(root, tuple(file.relative_to(root).as_posix() for file in files), sizes)


def _standard_library(root: Path) -> list[Path]:
    """The interpreter's own modules, without tests and installed packages."""
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in skipped]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(files, key=lambda file: file.relative_to(root).as_posix())


def open_source(key: str, name: str, path: str, tokenizer: Tokenizer) -> Source:
    """The token stream of a data set."""
    documents = find_documents(key, name, path)
    if isinstance(tokenizer, ByteTokenizer):
        return ByteSource(documents, tokenizer)
    return CachedSource(documents, tokenizer)


class ByteSource:
    """Bytes are tokens, so the files themselves are the stream."""

    def __init__(self, documents: Documents, tokenizer: ByteTokenizer) -> None:
        self._documents, self._end = documents, tokenizer.end
        self._ends = list(itertools.accumulate(size + 1 for size in documents.sizes))
        self.tokens = self._ends[-1]
        self.fingerprint = documents.fingerprint(tokenizer)

    def read(self, start: int, count: int) -> np.ndarray:
        out = np.full(count, self._end, dtype=np.int64)
        at = 0
        document = bisect.bisect_right(self._ends, start)
        while at < count:
            size = self._documents.sizes[document]
            offset = start + at - (self._ends[document] - size - 1)
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


_MAGIC = 20240520  # llm.c's shards: a header of 256 int32, then the ids
_HEADER_BYTES = 256 * 4


class CachedSource:
    """Token ids in a memory-mapped shard, made from the documents on first use."""

    def __init__(self, documents: Documents, tokenizer: Tokenizer) -> None:
        self.fingerprint = documents.fingerprint(tokenizer)
        dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
        path = _cache_folder(documents.root) / f"{self.fingerprint}.bin"
        with _locked(path):
            if not path.exists():
                _tokenize(documents, tokenizer, path, dtype)
        self._path, self._dtype = path, dtype
        self._ids = np.memmap(path, dtype=dtype, mode="r", offset=_HEADER_BYTES)
        self.tokens = len(self._ids)

    def __reduce__(self) -> tuple[object, ...]:  # a worker process maps the file again
        return _reopen, (self.fingerprint, self._path, self._dtype)

    def read(self, start: int, count: int) -> np.ndarray:
        return self._ids[start : start + count].astype(np.int64)


def _reopen(fingerprint: str, path: Path, dtype: np.dtype) -> CachedSource:
    source = CachedSource.__new__(CachedSource)
    source.fingerprint, source._path, source._dtype = fingerprint, path, dtype
    source._ids = np.memmap(path, dtype=dtype, mode="r", offset=_HEADER_BYTES)
    source.tokens = len(source._ids)
    return source


def _cache_folder(root: Path) -> Path:
    """Beside the text, or in the user's cache where that can't be written."""
    fallback = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "titanlite"
    folder = root / ".titanlite" if os.access(root, os.W_OK) else fallback
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process makes a cache, the others wait; the lock goes with the process."""
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _tokenize(documents: Documents, tokenizer: Tokenizer, path: Path, dtype: np.dtype) -> None:
    """Write the shard under another name, then rename it: it is whole or absent."""
    draft = path.with_suffix(".draft")
    count = 0
    with draft.open("wb") as out:
        out.write(bytes(_HEADER_BYTES))
        for name in documents.names:
            text = (documents.root / name).read_bytes().decode("utf-8", errors="replace")
            ids = np.asarray([*tokenizer.encode(text), tokenizer.end], dtype=dtype)
            out.write(ids.tobytes())
            count += len(ids)
        header = np.zeros(256, dtype=np.int32)
        header[:3] = _MAGIC, 1 if dtype.itemsize == 2 else 2, min(count, 2**31 - 1)
        out.seek(0)
        out.write(header.tobytes())
        out.flush()
        os.fsync(out.fileno())
    draft.rename(path)
