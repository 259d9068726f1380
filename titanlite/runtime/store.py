"""Every file-system call of checkpoints outside safetensors, for a folder that all ranks share.

`checkpoint/commit.py` relies on the following: when `write`, `sync` and `rename` return, the data
or the new name is on disk, and `rename` is atomic. All functions but `write_blocks`, `whole_file`,
`sync`, `rename` and those about a file system also take places in buckets (bucket.py). There,
`publish` creates the manifest, and an object is either complete or absent.
"""

import os
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

from titanlite.errors import UserError
from titanlite.runtime.bucket import BucketPath

is_writable = partial(os.access, mode=os.W_OK)


def make_folder(folder: Path) -> None:
    if not isinstance(folder, BucketPath):  # which has none
        os.makedirs(folder, exist_ok=True)


def staging_folder(target: Path, token: str) -> Path:
    """Return where a folder's files are written until it is published."""
    if isinstance(target, BucketPath):
        return target / token
    return target.with_name(f".{target.name}.{token}.staging")


def user_cache() -> Path:
    """Return the user's cache folder; its content can be recreated."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "titanlite"


@contextmanager
def draft_folder() -> Iterator[Path]:
    """Yield an empty folder in the user's cache, which is deleted at the end."""
    make_folder(user_cache())
    with TemporaryDirectory(dir=user_cache()) as name:
        yield Path(name)


def exists(path: Path) -> bool:
    return path.exists()


def is_folder(path: Path) -> bool:
    return path.is_dir()


def read(path: Path) -> bytes:
    return path.read_bytes()


def size(path: Path) -> int:
    return path.stat().st_size


def modified(path: Path) -> float:
    return path.stat().st_mtime


def list_folder(folder: Path) -> dict[str, Path]:
    """Return the entries of a folder by name; none if it does not exist."""
    return {path.name: path for path in folder.iterdir()} if folder.is_dir() else {}


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def same_file_system(folder: Path, other: Path) -> bool:
    return folder.stat().st_dev == other.stat().st_dev


def crc32(path: Path) -> int:
    """Return the checksum of a file, read in blocks."""
    checksum = 0
    for block in _blocks(path):
        checksum = zlib.crc32(block, checksum)
    return checksum


def _blocks(path: Path) -> Iterator[bytes]:
    if isinstance(path, BucketPath):
        yield from path.bucket.blocks(path.key)
        return
    with path.open("rb", buffering=0) as file:
        while block := file.read(1 << 20):
            yield block


def write(path: Path, content: bytes) -> None:
    if isinstance(path, BucketPath):
        path.bucket.put(path.key, [content], len(content))
        return
    path.write_bytes(content)
    sync(path)


def write_and_sum(
    path: Path, blocks: Iterable[bytes | memoryview], expected: int
) -> tuple[int, int]:
    """Write a large file of about this size; return its size and checksum."""
    if isinstance(path, BucketPath):
        counted = Counted(blocks)
        path.bucket.put(path.key, counted, expected)
        return counted.size, counted.crc32
    write_blocks(path, blocks)
    # Summed after the write: the checksum is of the file's content, and the disk works meanwhile.
    return sync_and_sum(path)


class Counted:
    """Blocks, and the size and checksum of those consumed so far."""

    def __init__(self, blocks: Iterable[bytes | memoryview]) -> None:
        self._blocks = blocks
        self.size = self.crc32 = 0

    def __iter__(self) -> Iterator[bytes | memoryview]:
        for block in self._blocks:
            self.size += len(block)
            self.crc32 = zlib.crc32(block, self.crc32)
            yield block


def write_blocks(path: Path, blocks: Iterable[bytes | memoryview]) -> None:
    """Write a large file from its blocks, without syncing it to disk."""
    with path.open("wb") as file:
        file.writelines(blocks)


def copy(path: Path, target: Path) -> tuple[int, int]:
    """Copy a file, possibly from or to a bucket; return its size and checksum."""
    counted = Counted(_blocks(path))
    if isinstance(target, BucketPath):
        target.bucket.put(target.key, counted, size(path))
    else:
        write_blocks(target, counted)
        sync(target)
    return counted.size, counted.crc32


def copy_below(source: Path, sizes: Mapping[str, int], target: Path) -> None:
    """Copy the files with these names and sizes that a folder lacks; each appears only when
    complete.
    """

    def bring(name: str) -> None:
        path = target / name
        if path.exists():
            return
        make_folder(path.parent)
        draft = path.with_name(f".{path.name}.part")
        if copy(source / name, draft)[0] != sizes[name]:
            raise UserError(f"{source / name} changed while it was copied")
        rename(draft, path)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(bring, sizes))


@contextmanager
def whole_file(path: Path, draft: Path | None = None) -> Iterator[BinaryIO]:
    """Write a file that is complete or absent: it gets its name once its bytes are on disk."""
    draft = draft or path.with_name(f".{path.name}.new")
    with draft.open("wb") as file:
        yield file
    sync(draft)
    rename(draft, path)


def replace(path: Path, content: bytes) -> None:
    """Replace a small file atomically."""
    if isinstance(path, BucketPath):
        write(path, content)
        return
    with whole_file(path) as file:
        file.write(content)


def publish(staging: Path, target: Path, name: str = "", content: bytes = b"") -> None:
    """Give a folder its name once its files are on disk, so that it is either complete or absent.

    In a bucket the files stay where they are, and a file that names their folder is created next to
    it.
    """
    if isinstance(target, BucketPath):
        last = target / name
        if not last.bucket.put_if_absent(last.key, content):
            raise FileExistsError(f"{last} was put there by another run")
        return
    sync(staging)
    rename(staging, target)


def share(path: Path) -> None:
    """Give a file that a library created as private the permissions of its folder, which follow the
    umask.
    """
    path.chmod(path.parent.stat().st_mode & 0o666)


def sync(path: Path) -> None:
    """Sync a file's bytes, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_and_sum(path: Path) -> tuple[int, int]:
    """Sync a file to disk; meanwhile compute its checksum, and return its size and checksum."""
    with ThreadPoolExecutor(1) as pool:
        synced = pool.submit(sync, path)
        checksum = crc32(path)
        synced.result()
    return size(path), checksum


def rename(path: Path, target: Path) -> None:
    """Rename a file or folder; a file with the new name is replaced."""
    path.replace(target)
    sync(target.parent)


def delete(path: Path) -> None:
    """Delete a file, a link (not its target), or a folder with its content, if it exists."""
    if isinstance(path, BucketPath):
        path.remove()
    elif path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
