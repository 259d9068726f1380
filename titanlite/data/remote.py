"""Token shards on an object store, read in one process.

A job has a local folder with their manifest and tokenizer. Windows are read by range until a whole
shard is cached there, by the first process that needs it; others may share the folder. No torch.
"""

import fcntl
import hashlib
import os
import queue
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from titanlite.data.shards import HEADER_BYTES, MANIFEST, TOKENIZER_FILES, Shard, parse_manifest
from titanlite.errors import OK, RunFailed, UserError, print_notice
from titanlite.runtime import store
from titanlite.runtime.bucket import BucketError, in_own_process, place

_PATIENCE_SECONDS = 5  # at a start
_PART = 16 << 20
_THREADS = 32
_STARTED = time.time()


def folder_of(key: str, path: str, cache_folder: str) -> Path:
    """Return a folder of shards; for a URL, the local one with its manifest and tokenizer.

    `key` is the config section to name in an error.
    """
    if "://" not in path:
        return Path(path)
    try:
        return _fetch_index(path, cache_folder)
    except UserError as error:
        raise type(error)(f"{key}.dataset_path: {error}") from None


@cache
def _fetch_index(url: str, cache_folder: str) -> Path:
    return Path(in_own_process("titanlite.data.remote", url, cache_folder))


def main(url: str, cache_folder: str) -> int:
    """Fetch the index of shards and print its folder; it is named by the manifest."""
    try:
        root = place(url, _PATIENCE_SECONDS)
        content = b"{}"
        with suppress(FileNotFoundError):
            content = store.read(root / MANIFEST)
        if parse_manifest(root / MANIFEST, content) is None:
            raise UserError(f"{url} has no {MANIFEST} of `titanlite data prepare`")
        name = hashlib.sha256(content).hexdigest()[:16]
        folder = (Path(cache_folder) if cache_folder else store.user_cache()) / "shards" / name
        store.make_folder(folder)
        if not (folder / MANIFEST).exists():
            for file in TOKENIZER_FILES:
                bring(root, folder / file)
            _put(folder / MANIFEST, content)
    except UserError as error:
        print_notice(str(error))
        return error.code
    except OSError as error:
        print_notice(f"training.dataloader.cache_folder: {error}")
        return UserError.code
    print(folder)
    return OK


def bring(root: Path, path: Path) -> None:
    """Copy a small file from a store, unless it is here or not there."""
    with suppress(FileNotFoundError):
        if not path.exists():
            _put(path, store.read(root / path.name))


def _put(path: Path, content: bytes) -> None:
    with store.whole_file(path, path.with_name(f".{path.name}.{os.getpid()}")) as file:
        file.write(content)


def at_once(function: Callable[..., object], *columns: Any) -> None:
    """Call a function of each row, in threads: what waits for a store waits together."""
    list(_threads().map(function, *columns))


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS, "windows")


class Remote:
    """Shards on a store, and their cache in a folder; a process that unpickles it starts anew."""

    def __init__(self, url: str, folder: Path, cache_bytes: int) -> None:
        self._arguments = url, folder, cache_bytes
        self.url = url
        self._folder = folder
        self._cache_bytes = cache_bytes
        self._tags = dict[Path, str]()
        self._wanted = queue.SimpleQueue[Shard]()
        self._asked = set[Path]()
        self._lock = threading.Lock()
        self._fault: RunFailed | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Remote, self._arguments

    def open(self, path: Path) -> BinaryIO:
        """Open a cached shard, and show that it is in use."""
        file = path.open("rb")
        with suppress(OSError):  # another user's
            os.utime(path)
        return file

    def bring(self, path: Path) -> None:
        """Copy a small file next to a shard."""
        bring(place(self.url), path)

    def read(self, shard: Shard, start: int, size: int) -> bytes:
        """Return bytes of a shard that is not cached, and let it be fetched in the background."""
        if self._fault:
            raise self._fault
        self._want(shard)
        return self._read(shard, start, size)

    def _read(self, shard: Shard, start: int, size: int) -> bytes:
        path: Any = place(self.url) / shard.path.name
        try:
            content, entry = path.bucket.read_range(path.key, start, size)
        except (BucketError, FileNotFoundError) as error:
            gone = "it is not there" if isinstance(error, FileNotFoundError) else error
            raise RunFailed(f"{path} cannot be read: {gone}") from None
        tag = entry["e_tag"]
        if entry["size"] != shard.size or self._tags.setdefault(shard.path, tag) != tag:
            was = f"it had {shard.size:,} bytes and the ETag {self._tags.get(shard.path)}"
            raise RunFailed(f"{path} has changed: {was}, now {entry['size']:,} and {tag}")
        return content

    def _want(self, shard: Shard) -> None:
        with self._lock:
            if not self._cache_bytes or shard.path in self._asked:
                return
            if not self._asked:
                threading.Thread(target=self._fetch_all, name="shards", daemon=True).start()
            self._asked.add(shard.path)
        self._wanted.put(shard)

    def _fetch_all(self) -> None:
        try:
            while True:
                self._fetch(self._wanted.get())
        except RunFailed as error:
            self._fault = error
        except OSError as error:
            print_notice(f"training.dataloader.cache_folder: {error}; shards are read by range")

    def _fetch(self, shard: Shard) -> None:
        """Cache a shard, unless another process does or there is no room."""
        part = shard.path.with_suffix(".part")
        with self._changing():
            if shard.path.exists() or not self._make_room(shard.size, part):
                return
            file = os.fdopen(os.open(part, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                return
            file.truncate(shard.size)  # now it counts
        with file:
            checksum = 0
            for at in range(0, shard.size, _PART):
                block = self._read(shard, at, min(_PART, shard.size - at))
                file.write(block)
                ids = memoryview(block)[HEADER_BYTES if at == 0 else 0 :]
                checksum = zlib.crc32(ids, checksum)
            file.flush()
            stated = int.from_bytes(os.pread(file.fileno(), 4, 12), "little")
            if stated and {checksum} != {stated, shard.crc32 or stated}:
                raise RunFailed(f"{self.url}/{shard.path.name} is not what was prepared: checksum")
            store.sync(part)
            with self._changing():
                store.rename(part, shard.path)

    def _make_room(self, size: int, part: Path) -> bool:
        """Remove the oldest shards of other data, unused since this process began, as far as
        needed; return whether there is room.

        Shards of the same data stay: in a shuffled order none is the next.
        """
        files = {path: path.stat() for path in self._folder.parent.glob("*/*.bin")}
        files |= {path: path.stat() for path in self._folder.parent.glob("*/*.part")}
        files.pop(part, None)
        used = size + sum(stat.st_size for stat in files.values())
        for path in sorted(files, key=lambda path: files[path].st_mtime):
            if used <= self._cache_bytes:
                break
            if path.parent != self._folder and files[path].st_mtime < _STARTED:
                path.unlink()
                used -= files[path].st_size
        return used <= self._cache_bytes

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Let one process at a time change which files the cache has."""
        with (self._folder.parent / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
