"""Read token shards: the files of ids in a manifest, on a disk or an object store, as one stream.

`titanlite data prepare` writes them in llm.c's format: a header of 256 int32 (magic, version, token
count), then ids, as uint16 in version 1 and as uint32 in version 2. For another program's files the
manifest states the type of the ids and where they begin.
"""

import bisect
import hashlib
import itertools
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from titanlite.errors import RunFailed, UserError, first_line, remedy
from titanlite.runtime import store
from titanlite.runtime.bucket import BucketError, BucketPath, Place, bucket_path

MAGIC = 20240520
HEADER_BYTES = 256 * 4
DATA_MANIFEST = "manifest.json"
TOKENIZER_SETTINGS = ("special_tokens_map.json", "tokenizer_config.json")
TOKENIZER_FILES = ("tokenizer.json", "chat_template.jinja", *TOKENIZER_SETTINGS)
OPEN_FILES = 16
"""Number of files of a source that stay open."""
SAMPLE_BYTES = 4096


def id_type(vocab_size: int) -> np.dtype:
    """Return the smallest type that holds the ids of a vocabulary."""
    if vocab_size <= 1 << 16:
        return np.dtype(np.uint16)
    return np.dtype(np.uint32)


def shard_header(tokens: int, dtype: np.dtype, crc32: int = 0) -> bytes:
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
    samples: Mapping[str, str]
    """For another program's files."""

    @property
    def size(self) -> int:
        return self.start + self.tokens * self.dtype.itemsize


def load_numbers(path: Path) -> np.memmap:
    """Memory-map a file in numpy's format.

    Raise a UserError unless it holds whole numbers in one dimension.
    """
    try:
        numbers = np.load(path, mmap_mode="r")
    except (ValueError, EOFError, OSError) as error:
        raise UserError(f"{path} is damaged: {first_line(error)}") from None
    if numbers.dtype.kind not in "iu" or numbers.ndim != 1:
        raise UserError(
            f"{path} holds {numbers.dtype} of shape {numbers.shape}, not integers in one dimension"
        )
    return numbers


class ShardSource:
    """The shards of a manifest as one stream.

    There may be 100,000 of them, so each is opened only when it is read. With `remote` they are on
    a store, and the folder holds only their manifest and tokenizer.
    """

    def __init__(self, folder: Path, vocab_size: int, remote: "Remote | None" = None) -> None:
        self._arguments = folder, vocab_size, remote
        self.remote = remote
        self.folder = folder
        self.vocab_size = vocab_size
        manifest = read_shard_manifest(folder)
        assert manifest, f"{folder} was not prepared"
        self._shards = _listed_shards(folder, manifest)
        self._stops = list(itertools.accumulate(shard.tokens for shard in self._shards))
        self.tokens: int = manifest["tokens"]
        self.end: int = manifest["end"]
        # Documents end where the files of their ends say, without an end token.
        self.has_index = self.end < 0 and manifest["documents"] > 0
        self.fingerprint = f"{manifest['fingerprint']}+{manifest['content']}"
        self.state: str = manifest["state"]
        """For files written by `titanlite data prepare`."""
        self._open = lru_cache(OPEN_FILES)(partial(open, mode="rb"))

    def __reduce__(self) -> tuple[Any, ...]:  # a worker process opens the files again
        return ShardSource, self._arguments

    def require_whole(self) -> None:
        """Raise a UserError if the shards' sizes differ from the manifest's; of another program's
        files samples are compared, too.
        """
        if self.remote:
            return  # each is checked when it is read
        for shard in self._shards:
            size = shard.path.stat().st_size if shard.path.is_file() else 0
            if size != shard.size:
                raise UserError(
                    f"{shard.path} has {size} bytes, and the {DATA_MANIFEST} in {self.folder} says "
                    f"{shard.size}: prepare the data again"
                )
            for name, sampled in shard.samples.items():
                if not os.path.isfile(name) or sample(Path(name)) != sampled:
                    raise UserError(
                        f"{name} has changed since it was listed in {self.folder}: remove that "
                        "folder and prepare the data again"
                    )

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
            path = ends_file(self.folder, number)
            if self.remote:
                self.remote.bring(path)
            found = load_numbers(path)
            low, high = np.searchsorted(found, (offset, offset + length), side="right")
            first = self._stops[number] - self._shards[number].tokens
            ends.append(found[low:high].astype(np.int64) + first)
        return ended(np.concatenate(ends), stop)


def ended(ends: np.ndarray, stop: int) -> np.ndarray:
    """Return ends of documents, and the region's end if a document continues there."""
    if len(ends) and ends[-1] == stop:
        return ends
    return np.append(ends, stop)


def ends_file(folder: Path, number: int) -> Path:
    """Return the file with the positions after each document's end in a shard."""
    return folder / f"shard-{number:06}.ends.npy"


def write_ends(folder: Path, number: int, ends: np.ndarray) -> None:
    """Write that file to the disk."""
    path = ends_file(folder, number)
    np.save(path, ends)
    store.sync(path)


def _listed_shards(folder: Path, manifest: dict[str, Any]) -> list[Shard]:
    own = id_type(manifest["vocab_size"]).str
    return [
        Shard(
            folder / shard["file"],
            np.dtype(shard.get("dtype", own)),
            shard.get("start", HEADER_BYTES),
            shard["tokens"],
            shard.get("samples", {}),
        )
        for shard in manifest["shards"]
    ]


def sample(path: Path) -> str:
    """Hash the size of a file and its bytes at five places, which is enough to detect that it was
    replaced.
    """
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        content = b"%d" % size
        for part in range(5):
            file.seek(max(0, size - SAMPLE_BYTES) * part // 4)
            content += file.read(SAMPLE_BYTES)
    return hashlib.sha256(content).hexdigest()[:16]


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


def read_shard_manifest(folder: Path | Place) -> dict[str, Any] | None:
    """Read the manifest that `titanlite data prepare` wrote into a folder; None if there is none,
    or only another program's.
    """
    path = folder / DATA_MANIFEST
    if path.is_file():
        return parse_manifest(path, path.read_bytes())
    return None


def parse_manifest(path: Path | Place, content: bytes) -> dict[str, Any] | None:
    """Return the manifest in a file; None if the file is another program's."""
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
                gone = "it does not exist"
            raise RunFailed(f"{path} cannot be read: {gone}") from None
        tag = entry["e_tag"]
        if entry["size"] != shard.size or self._tags.setdefault(shard.path, tag) != tag:
            was = f"it had {shard.size:,} bytes and the ETag {self._tags.get(shard.path)}"
            raise RunFailed(f"{path} has changed: {was}, now {entry['size']:,} and {tag}")
        return content


def bring(root: BucketPath, path: Path) -> None:
    """Copy a small file from a store, unless it exists here or is missing there."""
    with suppress(FileNotFoundError):
        if not path.exists():
            put(path, (root / path.name).read_bytes())


def put(path: Path, content: bytes) -> None:
    with store.whole_file(path, path.with_name(f".{path.name}.{os.getpid()}")) as file:
        file.write(content)
