"""Read token shards: files of token ids, memory-mapped as one stream.

`.bin` is llm.c's format: a header of 256 int32 (magic, version, token count), then ids: uint16 in
version 1, uint32 in version 2. `.npy` is OLMo's: ids in the smallest type that holds the
vocabulary, or numpy's own format.
"""

import bisect
import hashlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from titanlite.data.fingerprint import fingerprint as hash_text
from titanlite.errors import RunFailed, UserError, first_line

MAGIC = 20240520
HEADER_BYTES = 256 * 4
MANIFEST = "manifest.json"


def id_type(vocab_size: int) -> np.dtype:
    """Return the smallest type that holds the ids of a vocabulary."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def header(tokens: int, dtype: np.dtype, crc32: int = 0) -> bytes:
    """Return the header of a .bin shard.

    The checksum of its ids is in a place that other readers ignore.
    """
    values = np.zeros(256, dtype=np.uint32)
    values[:4] = MAGIC, 1 if dtype.itemsize == 2 else 2, tokens, crc32
    return values.tobytes()


def open_shard(path: Path, vocab_size: int) -> np.ndarray:
    """Memory-map the ids of one shard; raise a UserError if its format is wrong."""
    try:
        if path.suffix == ".npy":
            return _open_npy(path, vocab_size)
        size = path.stat().st_size
        start = (
            np.fromfile(path, dtype=np.int32, count=3)
            if size >= HEADER_BYTES
            else np.zeros(3, np.int32)
        )
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    if start[0] != MAGIC or start[1] not in (1, 2):
        raise UserError(
            f"{path} is not a token shard: it does not start with {MAGIC} and version 1 or 2"
        )
    dtype = np.dtype(np.uint16 if start[1] == 1 else np.uint32)
    if (expected := HEADER_BYTES + int(start[2]) * dtype.itemsize) != size:
        raise UserError(
            f"{path} is damaged: {start[2]} tokens make {expected} bytes, and it has {size}"
        )
    return (
        np.memmap(path, dtype=dtype, mode="r", offset=HEADER_BYTES)
        if start[2]
        else np.zeros(0, dtype)
    )


def _open_npy(path: Path, vocab_size: int) -> np.ndarray:
    with path.open("rb") as file:
        start = file.read(4096)
    if start.startswith(b"\x93NUMPY"):
        return _load_numbers(path)
    # The upper bytes of such a vocabulary's uint16 are zero.
    is_uint8 = vocab_size <= 256 and any(start[1::2])
    dtype = np.dtype(np.uint8) if is_uint8 else id_type(vocab_size)
    if path.stat().st_size % dtype.itemsize:
        raise UserError(
            f"{path} is damaged: its size is not a multiple of {dtype.itemsize} bytes ({dtype})"
        )
    return np.memmap(path, dtype=dtype, mode="r")


def _load_numbers(path: Path) -> np.ndarray:
    """Memory-map a file in numpy's format.

    Raise a UserError unless it holds whole numbers in one dimension.
    """
    try:
        numbers = np.load(path, mmap_mode="r")
    except (ValueError, EOFError) as error:
        raise UserError(f"{path} is damaged: {first_line(error)}") from None
    if numbers.dtype.kind not in "iu" or numbers.ndim != 1:
        raise UserError(
            f"{path} holds {numbers.dtype} of shape {numbers.shape}, not integers in one dimension"
        )
    return numbers


class ShardSource:
    """A folder of shards, or one shard, as one stream in the order of their names."""

    def __init__(
        self, key: str, path: Path, vocab_size: int, end: int, fingerprint: str = ""
    ) -> None:
        if not path.exists():
            raise UserError(f"{key}.dataset_path: there is no folder or file {path}")
        self._arguments = key, path, vocab_size, end
        self.folder = path if path.is_dir() else path.parent
        files = (
            sorted(p for p in path.iterdir() if p.suffix in (".bin", ".npy"))
            if path.is_dir()
            else [path]
        )
        self.paths = [file for file in files if not file.name.endswith(".ends.npy")]
        self.vocab_size = vocab_size
        self.manifest = read_manifest(self.folder) if path.is_dir() else None
        self.end = self.manifest["end"] if self.manifest else end
        # Plain arrays: slicing a np.memmap takes longer than copying a window.
        self._ids = [np.asarray(open_shard(path, vocab_size)) for path in self.paths]
        self._stops = list(itertools.accumulate(len(ids) for ids in self._ids))
        self.tokens = sum(len(ids) for ids in self._ids)
        if not self.tokens:
            raise UserError(
                f"{key}.dataset_path: no tokens in {path} (looked for .bin and .npy shards)"
            )
        if m := self.manifest:
            if (actual := (self.tokens, len(self.paths))) != (
                expected := (m["tokens"], len(m["shards"]))
            ):
                raise UserError(
                    f"{path}: (tokens, shards) are {actual}, but its {MANIFEST} says {expected}"
                )
            # Older versions have none.
            fingerprint = m["fingerprint"] + f"+{m['content']}" * ("content" in m)
        elif not fingerprint:
            listing = "\n".join(
                f"{p.name}:{len(ids)}" for p, ids in zip(self.paths, self._ids, strict=True)
            )
            fingerprint = f"{hash_text(listing)}+{self._hash_samples()}"
        self.fingerprint = fingerprint
        # Of the text that was prepared.
        self.state: str = self.manifest["state"] if self.manifest else ""

    def __reduce__(self) -> tuple[Any, ...]:  # a worker process maps the files again
        return ShardSource, (*self._arguments, self.fingerprint)

    def _hash_samples(self) -> str:
        """Hash the ids at five places of every shard, or all of a short one."""
        digest = hashlib.sha256()
        for ids, stop in zip(self._ids, self._stops, strict=True):
            for start in range(stop - len(ids), stop, max(1024, len(ids) // 4)):
                digest.update(self.read(start, min(1024, stop - start)).tobytes())
        return digest.hexdigest()[:8]

    def read(self, start: int, count: int) -> np.ndarray:
        """Return `count` ids from position `start` on.

        A view of the file if they lie in one shard.
        """
        pieces: list[np.ndarray] = []
        for shard, offset, length in spans(self._stops, start, count):
            piece = self._ids[shard][offset : offset + length]
            if piece.max() >= self.vocab_size or piece.min() < 0:
                first = int(np.argmax((piece >= self.vocab_size) | (piece < 0)))
                position = f"{self.paths[shard]}: id {piece[first]} at token {offset + first}"
                raise RunFailed(f"{position} is not in the model's vocabulary of {self.vocab_size}")
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def document_ends(self) -> np.ndarray:
        """Return the position after each document's end token."""
        ends = []
        for path, ids, stop in zip(self.paths, self._ids, self._stops, strict=True):
            index = path.with_suffix(".ends.npy")  # written by `titanlite data prepare`
            local_ends = (
                _load_numbers(index) if index.exists() else np.flatnonzero(ids == self.end) + 1
            )
            ends.append(local_ends.astype(np.int64) + stop - len(ids))
        all_ends = np.concatenate(ends)
        return (
            all_ends
            if len(all_ends) and all_ends[-1] == self.tokens
            else np.append(all_ends, self.tokens)
        )


def spans(stops: list[int], start: int, count: int) -> Iterator[tuple[int, int, int]]:
    """Yield (part, offset in it, length) for `count` ids from `start` on.

    `stops` has the end of each part.
    """
    stop, part = start + count, bisect.bisect_right(stops, start)
    while start < stop:
        length = min(stops[part], stop) - start
        if length:
            yield part, start - (stops[part - 1] if part else 0), length
        start, part = start + length, part + 1


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Read the manifest that `titanlite data prepare` wrote into a folder; None if there is none,
    or another's.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}") from None
    return manifest if "fingerprint" in manifest else None
