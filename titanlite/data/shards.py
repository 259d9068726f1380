"""Token shards: files of token ids, memory-mapped as one stream.

`.bin` is llm.c's format: a header of 256 int32 (magic, version, token count), then the ids: uint16 in version 1,
uint32 in version 2. `.npy` is OLMo's: ids alone, in the smallest type that holds the vocabulary (numpy's own .npy is
read as well). A folder that `titanlite data prepare` made has a manifest besides.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np

from titanlite.errors import UserError

MAGIC = 20240520
HEADER_BYTES = 256 * 4
MANIFEST = "manifest.json"


def id_type(vocab_size: int) -> np.dtype:
    """The smallest type for the ids of a vocabulary."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def header(tokens: int, dtype: np.dtype) -> bytes:
    """The first bytes of a .bin shard."""
    values = np.zeros(256, dtype=np.int32)
    values[:3] = MAGIC, 1 if dtype.itemsize == 2 else 2, tokens
    return values.tobytes()


def open_shard(path: Path, vocab_size: int) -> np.ndarray:
    """The ids of one shard, memory-mapped, after its size was found to be right."""
    try:
        if path.suffix == ".npy":
            return _open_npy(path, vocab_size)
        size = path.stat().st_size
        start = np.fromfile(path, dtype=np.int32, count=3) if size >= HEADER_BYTES else np.zeros(3, np.int32)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    if start[0] != MAGIC or start[1] not in (1, 2):
        raise UserError(f"{path} is not a token shard: it does not begin with {MAGIC} and version 1 or 2")
    dtype = np.dtype(np.uint16 if start[1] == 1 else np.uint32)
    if (expected := HEADER_BYTES + int(start[2]) * dtype.itemsize) != size:
        raise UserError(f"{path} is damaged: {start[2]} tokens make {expected} bytes, and it has {size}")
    if not start[2]:
        return np.zeros(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r", offset=HEADER_BYTES)


def _open_npy(path: Path, vocab_size: int) -> np.ndarray:
    with path.open("rb") as file:
        if file.read(6) == b"\x93NUMPY":
            return np.load(path, mmap_mode="r")
    dtype = id_type(vocab_size)
    if path.stat().st_size % dtype.itemsize:
        raise UserError(f"{path} is damaged: its size is no multiple of {dtype.itemsize} bytes ({dtype})")
    return np.memmap(path, dtype=dtype, mode="r")


class ShardSource:
    """Shards in order of their names, as one stream."""

    def __init__(self, key: str, path: Path, vocab_size: int, end: int) -> None:
        if not path.exists():
            raise UserError(f"{key}.dataset_path: there is no folder or file {path}")
        self.folder = path if path.is_dir() else path.parent
        files = sorted(p for p in path.iterdir() if p.suffix in (".bin", ".npy")) if path.is_dir() else [path]
        self.paths = [file for file in files if not file.name.endswith(".ends.npy")]
        self.vocab_size = vocab_size
        self.manifest = read_manifest(self.folder) if path.is_dir() else None
        self.end = self.manifest["end"] if self.manifest else end
        self.knows_ends = self.end >= 0
        self._open()
        if not self.tokens:
            raise UserError(f"{key}.dataset_path: no tokens in {path} (looked for .bin and .npy shards)")
        if m := self.manifest:
            says, found = (m["tokens"], len(m["shards"])), (self.tokens, len(self.paths))
            if says != found:
                raise UserError(f"{path}: (tokens, shards) are {found}, and its {MANIFEST} says {says}")
            self.fingerprint: str = m["fingerprint"]
        else:
            described = "\n".join(f"{p.name}:{len(ids)}" for p, ids in zip(self.paths, self._ids, strict=True))
            self.fingerprint = hashlib.sha256(described.encode()).hexdigest()[:16]

    def _open(self) -> None:
        # Not as memmaps: a slice of one takes longer to make than a window's copy.
        self._ids = [np.asarray(open_shard(path, self.vocab_size)) for path in self.paths]
        self._stops = list(itertools.accumulate(len(ids) for ids in self._ids))
        self.tokens = self._stops[-1] if self._stops else 0

    def __getstate__(self) -> dict[str, Any]:  # a worker process maps the files again
        return {name: value for name, value in self.__dict__.items() if name not in ("_ids", "_stops")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def read(self, start: int, count: int) -> np.ndarray:
        """A view of the file where they lie in one: whoever makes a window copies them anyway."""
        at, shard = 0, bisect.bisect_right(self._stops, start)
        pieces: list[np.ndarray] = []
        while at < count:
            offset = start + at - (self._stops[shard] - len(self._ids[shard]))
            piece = self._ids[shard][offset : offset + count - at]
            if len(piece) and (largest := int(piece.max())) >= self.vocab_size:
                where = offset + int(np.argmax(piece >= self.vocab_size))
                beyond = f"is beyond the model's vocabulary of {self.vocab_size}"
                raise UserError(f"{self.paths[shard]}: id {largest} at or after token {where} {beyond}")
            pieces.append(piece)
            at += len(piece)
            shard += 1
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def document_ends(self) -> np.ndarray:
        """Where each document stops, its end token included."""
        ends = []
        for path, ids, stop in zip(self.paths, self._ids, self._stops, strict=True):
            kept = path.with_suffix(".ends.npy")
            local = np.load(kept) if kept.exists() else np.flatnonzero(ids == self.end) + 1
            ends.append(local.astype(np.int64) + stop - len(ids))
        found = np.concatenate(ends)
        return found if len(found) and found[-1] == self.tokens else np.append(found, self.tokens)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """What `titanlite data prepare` wrote of a folder; None where it did not."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}") from None
