"""Read token shards, files of token ids on a disk or an object store, as one stream.

`.bin` is llm.c's format: a header of 256 int32 (magic, version, token count), then ids, uint16 in
version 1 and uint32 in version 2. `.npy` is OLMo's format (ids in the smallest type that holds the
vocabulary, with the ends of documents in a `.csv.gz` next to it), or numpy's. A `.bin` with an
`.idx` next to it is Megatron's.
"""

import bisect
import hashlib
import itertools
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from titanlite.data.fingerprint import fingerprint as hash_text
from titanlite.data.megatron import index_of, read_index
from titanlite.data.olmo import read_table, table_of
from titanlite.errors import RunFailed, UserError, first_line, remedy
from titanlite.runtime import store
from titanlite.runtime.bucket import BucketError, BucketPath, Place, bucket_path

MAGIC = 20240520
HEADER_BYTES = 256 * 4
MANIFEST = "manifest.json"
TOKENIZER_SETTINGS = ("special_tokens_map.json", "tokenizer_config.json")
TOKENIZER_FILES = ("tokenizer.json", "chat_template.jinja", *TOKENIZER_SETTINGS)
OPEN_FILES = 16
"""Files of a source that are kept open."""
SCAN_TOKENS = 1 << 24
SAMPLES = 64
SAMPLE_BYTES = 1 << 20
"""Samples of an index file, which may be arbitrarily large."""


def id_type(vocab_size: int) -> np.dtype:
    """Return the smallest type that holds the ids of a vocabulary."""
    if vocab_size <= 1 << 16:
        return np.dtype(np.uint16)
    return np.dtype(np.uint32)


def header(tokens: int, dtype: np.dtype, crc32: int = 0) -> bytes:
    """Return the header of a .bin shard. Other readers ignore the field with the checksum."""
    values = np.zeros(256, dtype=np.uint32)
    values[:4] = MAGIC, 1 if dtype.itemsize == 2 else 2, tokens, crc32
    return values.tobytes()


@dataclass(frozen=True)
class Shard:
    """The ids in one file."""

    path: Path
    dtype: np.dtype
    start: int
    """Bytes before the first id."""
    tokens: int
    index: Path | None = None
    """The file with the ends of documents: Megatron's index, or OLMo's table."""

    @property
    def size(self) -> int:
        return self.start + self.tokens * self.dtype.itemsize


def open_shard(path: Path, vocab_size: int, raw_type: str = "") -> Shard:
    """Find the ids in one shard; their type is `raw_type` if the file does not record it.

    Raise a UserError if the format is wrong.
    """
    try:
        size = path.stat().st_size
        index = index_of(path)
        if index:
            dtype, _ = read_index(index, size)
            return Shard(path, dtype, 0, size // dtype.itemsize, index)
        if path.suffix == ".npy":
            return _open_npy(path, vocab_size, raw_type)
        first = np.fromfile(path, dtype=np.int32, count=3)
        if raw_type and first[:1] != MAGIC:
            return _open_raw(path, np.dtype(raw_type))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}{remedy(error)}") from None
    if size < HEADER_BYTES or first[0] != MAGIC or first[1] not in (1, 2):
        raise UserError(
            f"{path} is not a token shard: it does not start with {MAGIC} and version 1 or 2"
        )
    dtype = np.dtype(np.uint32)
    if first[1] == 1:
        dtype = np.dtype(np.uint16)
    shard = Shard(path, dtype, HEADER_BYTES, int(first[2]))
    if shard.size != size:
        raise UserError(
            f"{path} is damaged: {first[2]} tokens make {shard.size} bytes, and it has {size}"
        )
    return shard


def _open_npy(path: Path, vocab_size: int, raw_type: str) -> Shard:
    with path.open("rb") as file:
        first = file.read(4096)
    if first.startswith(b"\x93NUMPY"):
        numbers = _load_numbers(path)
        return Shard(path, numbers.dtype, numbers.offset, len(numbers), table_of(path))
    if raw_type:
        return _open_raw(path, np.dtype(raw_type))
    # In uint16, the upper bytes of such a vocabulary would be zero.
    is_uint8 = vocab_size <= 256 and any(first[1::2])
    dtype = np.dtype(np.uint8) if is_uint8 else id_type(vocab_size)
    ids = np.frombuffer(first[: len(first) // dtype.itemsize * dtype.itemsize], dtype)
    if dtype != np.uint8 and len(first) > 64 and ids.any() and not ids[1::2].any():
        raise UserError(
            f"{path} seems to have ids of {2 * dtype.itemsize} bytes or more, and those of a "
            f"vocabulary of {vocab_size} are read as {dtype}; name their type in "
            "training.dataloader.token_dtype"
        )
    return _open_raw(path, dtype)


def _open_raw(path: Path, dtype: np.dtype) -> Shard:
    """Find the ids in a file that has nothing else."""
    tokens, rest = divmod(path.stat().st_size, dtype.itemsize)
    if rest:
        raise UserError(
            f"{path} is damaged: its size is not a multiple of {dtype.itemsize} bytes ({dtype})"
        )
    return Shard(path, dtype, 0, tokens, table_of(path))


def _load_numbers(path: Path) -> np.memmap:
    """Memory-map a file in numpy's format; raise a UserError unless it has a vector of integers."""
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
    """A folder of shards, or one shard, as one stream in the order of their names.

    There may be 100,000 of them, so shards listed in a manifest are opened only when read. With
    `remote` they are on a store, and the folder has only their manifest and tokenizer.
    """

    def __init__(
        self,
        key: str,
        path: Path,
        vocab_size: int,
        end: int,
        remote: "Remote | None" = None,
        raw_type: str = "",
        fingerprint: str = "",
    ) -> None:
        self._arguments = key, path, vocab_size, end, remote, raw_type
        self.remote = remote
        self.folder = path if path.is_dir() else path.parent
        self.vocab_size = vocab_size
        self.manifest = read_manifest(path) if path.is_dir() else None
        self.end = self.manifest["end"] if self.manifest else end
        self._open = lru_cache(OPEN_FILES)(partial(open, mode="rb"))
        if self.manifest:
            self._shards = _listed_shards(path, self.manifest)
        else:
            self._shards = [open_shard(file, vocab_size, raw_type) for file in _find_shards(path)]
        self._stops = list(itertools.accumulate(shard.tokens for shard in self._shards))
        self.tokens = self._stops[-1] if self._stops else 0
        if not self.tokens:
            raise UserError(
                f"{key}.dataset_path: no tokens in {path} (looked for .bin and .npy shards); text "
                f'is {key}.dataset = "text", or becomes tokens by titanlite data prepare'
            )
        if self.manifest:
            fingerprint = f"{self.manifest['fingerprint']}+{self.manifest['content']}"
        elif not fingerprint:
            files = []
            for shard in self._shards:
                files.append(f"{os.path.relpath(shard.path, self.folder)}:{shard.tokens}")
            listing = "\n".join(files)
            fingerprint = f"{hash_text(listing)}+{self._hash_samples()}"
        self.fingerprint = fingerprint
        is_chat = self.manifest is not None and self.end < 0
        self.has_index = is_chat or any(shard.index for shard in self._shards)
        """Whether an index tells where documents end, with or without end tokens."""
        if self.has_index and not self.manifest:
            self.document_ends(0, 1)  # raises if an index does not fit its ids
        self.state: str = self.manifest["state"] if self.manifest else ""
        """The state of the prepared text."""

    def __reduce__(self) -> tuple[Any, ...]:  # a worker process opens the files again
        return ShardSource, (*self._arguments, self.fingerprint)

    def require_whole(self) -> None:
        """Raise a UserError unless the folder has the shards of its manifest."""
        if not self.manifest or self.remote:
            return  # each shard was opened, or is checked when it is read
        expected = {shard.path: shard.size for shard in self._shards}
        actual = {path: path.stat().st_size for path in _find_shards(self.folder)}
        for path in sorted(expected.keys() | actual.keys()):
            should = expected.get(path, 0)
            has = actual.get(path, 0)
            if has != should:
                raise UserError(
                    f"{path} has {has} bytes, but should have {should} according to {MANIFEST}; "
                    "prepare the data again"
                )

    def _hash_samples(self) -> str:
        """Hash the ids at five places of every shard, or all ids of a short one."""
        digest = hashlib.sha256()
        for shard, stop in zip(self._shards, self._stops, strict=True):
            for start in range(stop - shard.tokens, stop, max(1024, shard.tokens // 4)):
                digest.update(self.read(start, min(1024, stop - start)).tobytes())
            if shard.index:  # other document ends are other data
                digest.update(_sample(shard.index))
        return digest.hexdigest()[:8]

    def read(self, start: int, count: int) -> np.ndarray:
        """Return `count` ids from position `start` on."""
        pieces: list[np.ndarray] = []
        for number, offset, length in spans(self._stops, start, count):
            piece = self._read(number, offset, length)
            if piece.max() >= self.vocab_size or piece.min() < 0:
                first = int(np.argmax((piece >= self.vocab_size) | (piece < 0)))
                path = self._shards[number].path
                position = f"{path}: id {piece[first]} at token {offset + first}"
                raise RunFailed(f"{position} is not in the model's vocabulary of {self.vocab_size}")
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _read(self, number: int, offset: int, length: int) -> np.ndarray:
        """Return ids of one shard.

        A memory map would read megabytes beyond each window, and keep every file open.
        """
        shard = self._shards[number]
        start = shard.start + offset * shard.dtype.itemsize
        size = length * shard.dtype.itemsize
        if self.remote:
            content = self.remote.read(shard, start, size)
        else:
            content = self._read_file(shard.path, start, size)
        if len(content) != size:
            raise RunFailed(f"{shard.path} is shorter than the {shard.size} bytes it should have")
        return np.frombuffer(content, shard.dtype)

    def _read_file(self, path: Path, start: int, size: int) -> bytes:
        try:
            file = self._open(path)  # closed when evicted from the cache
            return os.pread(file.fileno(), size, start)
        except OSError as error:
            why = f"{error.strerror}{remedy(error)}"
            raise RunFailed(f"{path} cannot be read: {why}") from None

    def is_end(self, start: int, tokens: np.ndarray) -> np.ndarray:
        """Return which of the tokens from position `start` on are the last of a document."""
        if not self.has_index:
            return tokens == self.end
        stop = start + len(tokens)
        return np.isin(np.arange(start + 1, stop + 1), self.document_ends(start, stop + 1))

    def document_ends(self, begin: int = 0, stop: int | None = None) -> np.ndarray:
        """Return the position after each document in a region, and the region's end."""
        stop = self.tokens if stop is None else stop
        ends = []
        for number, offset, length in spans(self._stops, begin, stop - begin):
            shard = self._shards[number]
            first = self._stops[number] - shard.tokens
            index = shard.index
            own = shard.path.with_suffix(".ends.npy")  # written by `titanlite data prepare`
            if self.remote:
                self.remote.bring(own)
            if index or own.exists():
                if not index:
                    found = _load_numbers(own)
                elif index.suffix == ".idx":
                    found = read_index(index, shard.size)[1]
                else:
                    found = read_table(index, shard.tokens)
                low, high = np.searchsorted(found, (offset, offset + length), side="right")
                ends.append(found[low:high].astype(np.int64) + first)
                continue
            for at in range(offset, offset + length, SCAN_TOKENS):
                ids = self._read(number, at, min(SCAN_TOKENS, offset + length - at))
                ends.append(np.flatnonzero(ids == self.end) + 1 + first + at)
        return ended(np.concatenate(ends), stop)


def ended(ends: np.ndarray, stop: int) -> np.ndarray:
    """Return ends of documents, and the region's end if a document continues there."""
    if len(ends) and ends[-1] == stop:
        return ends
    return np.append(ends, stop)


def _listed_shards(folder: Path, manifest: dict[str, Any]) -> list[Shard]:
    """Return the shards of a manifest, which are in the order of their names."""
    dtype = id_type(manifest["vocab_size"])
    found = list[Shard]()
    for shard in manifest["shards"]:
        found.append(Shard(folder / shard["file"], dtype, HEADER_BYTES, shard["tokens"]))
    return found


def _find_shards(path: Path) -> list[Path]:
    """Return the shards in a folder and its subfolders; hidden files belong to other programs."""
    if not path.is_dir():
        return [path]
    found = []
    for file in path.rglob("*"):
        if file.suffix not in (".bin", ".npy") or file.name.endswith(".ends.npy"):
            continue
        if not any(part.startswith(".") for part in file.relative_to(path).parts):
            found.append(file)
    return sorted(found)


def _sample(path: Path) -> bytes:
    """Return a hash of a file's size and its bytes, or samples of them if it is large."""
    size = path.stat().st_size
    step = max(SAMPLE_BYTES, size // SAMPLES)
    with path.open("rb") as file:
        parts = (os.pread(file.fileno(), SAMPLE_BYTES, at) for at in range(0, size, step))
        return hashlib.sha256(b"".join([b"%d" % size, *parts])).digest()


def spans(stops: list[int], start: int, count: int) -> Iterator[tuple[int, int, int]]:
    """Yield (part, offset in it, length) for `count` ids from `start` on.

    `stops` has the end of each part.
    """
    stop = start + count
    part = bisect.bisect_right(stops, start)
    while start < stop:
        length = min(stops[part], stop) - start
        begin = stops[part - 1] if part else 0
        if length:
            yield part, start - begin, length
        start += length
        part += 1


def read_manifest(folder: Path | Place) -> dict[str, Any] | None:
    """Read the manifest that `titanlite data prepare` wrote into a folder; None if there is none,
    or another's.
    """
    path = folder / MANIFEST
    if path.is_file():
        return parse_manifest(path, path.read_bytes())
    return None


def parse_manifest(path: Path | Place, content: bytes) -> dict[str, Any] | None:
    """Return the manifest that a file holds; None if it is another's."""
    try:
        manifest = json.loads(content)
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}") from None
    return manifest if "fingerprint" in manifest else None


class Remote:
    """Shards on an object store, each read from one version only, by range requests."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._tags = dict[Path, str]()

    def bring(self, path: Path) -> None:
        """Copy a small file next to a shard."""
        bring(bucket_path(self.url), path)

    def read(self, shard: Shard, start: int, size: int) -> bytes:
        """Return bytes of a shard."""
        path = bucket_path(self.url) / shard.path.name
        try:
            content, entry = path.bucket.read_range(path.key, start, size)
        except (BucketError, FileNotFoundError) as error:
            gone = error
            if isinstance(error, FileNotFoundError):
                gone = "it is not there"
            raise RunFailed(f"{path} cannot be read: {gone}") from None
        tag = entry["e_tag"]
        if entry["size"] != shard.size or self._tags.setdefault(shard.path, tag) != tag:
            was = f"it had {shard.size:,} bytes and the ETag {self._tags.get(shard.path)}"
            raise RunFailed(f"{path} has changed: {was}, now {entry['size']:,} and {tag}")
        return content


def bring(root: BucketPath, path: Path) -> None:
    """Copy a small file from a store, unless it is here or not there."""
    with suppress(FileNotFoundError):
        if not path.exists():
            put(path, (root / path.name).read_bytes())


def put(path: Path, content: bytes) -> None:
    with store.whole_file(path, path.with_name(f".{path.name}.{os.getpid()}")) as file:
        file.write(content)
