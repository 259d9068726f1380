"""Places of files in a file system; bucket.py has the other kind, with the same methods.

`checkpoint/commit.py` relies on this: written bytes, and the new name that `rename` gives, are on
disk when the call returns, and `rename` is atomic. A bucket renames nothing: an object is either
complete or absent, and the last one to be put names the others.
"""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path, PosixPath
from typing import Any, BinaryIO


class LocalPath(PosixPath):
    """A file or folder, with the methods that BucketPath implements differently."""

    renames = True
    """Whether a folder gets its name once it is complete, and locks may exist; otherwise a folder
    is complete once its last file exists.
    """

    def __reduce__(self) -> Any:
        """Pickle as a Path, since torch's DCP puts its folder into `.metadata`, which other
        programs read.
        """
        return Path, self.parts

    def local(self) -> LocalPath:
        """Return the local path, for a library that needs one; raise if there is none."""
        return self

    def entries(self) -> dict[str, LocalPath]:
        """Return a folder's entries by name; none if it does not exist."""
        return {path.name: path for path in self.iterdir()} if self.is_dir() else {}

    def blocks(self) -> Iterator[bytes]:
        """Yield the content of a file."""
        with self.open("rb", buffering=0) as file:
            yield from iter(partial(file.read, 1 << 20), b"")

    def put(self, content: bytes) -> None:
        """Write a small file, which always has either its old or its new content."""
        with whole_file(self) as file:
            file.write(content)

    def put_blocks(self, blocks: Iterable[bytes | memoryview], size: int) -> tuple[int, int]:
        """Write a large file of about this size; return its size and checksum."""
        with self.open("wb") as file:
            file.writelines(blocks)
        # The checksum is taken after the write, so that it is of the file's content, and the disk
        # works meanwhile.
        with ThreadPoolExecutor(1) as pool:
            synced = pool.submit(sync, self)
            checksum = crc32(self.blocks())
            synced.result()
        return self.stat().st_size, checksum

    def make(self) -> None:
        """Make a folder, if this kind of place has folders."""
        os.makedirs(self, exist_ok=True)

    def remove(self) -> None:
        """Delete a file, a link but not its target, or a folder with its content, if it exists."""
        if self.is_dir() and not self.is_symlink():
            shutil.rmtree(self)
        else:
            self.unlink(missing_ok=True)

    def is_taken(self, last: str) -> bool:
        """Return whether a folder exists, rather than its remains, judging by the file that is put
        last.
        """
        return self.is_file() or bool(self.entries())

    def staging(self, token: str) -> LocalPath:
        """Return the place where all ranks write the files of a folder until it is published."""
        return self.with_name(f".{self.name}.{token}.staging")

    def discard(self) -> None:
        """Delete a staging folder after a failure, which may have been a full disk."""
        self.remove()

    def publish(self, staging: Any, last: str = "", content: bytes = b"") -> None:
        """Give a folder its name once its files are on disk, so that it is either complete or
        absent. An empty folder of that name is replaced.
        """
        sync(staging)
        rename(staging, self)

    def withdraw(self, last: str) -> None:
        """Delete a published folder, first its name, so that half of it is never taken for a
        complete one.

        If it is a link to another place, such as an archive, only the link is deleted.
        """
        deleted = self.with_name(f".{self.name}.deleted")
        rename(self, deleted)
        if not deleted.is_symlink():
            (deleted / last).remove()
        deleted.remove()

    def draft(self) -> LocalPath:
        """Return the place where a process makes this folder, and where it continues after being
        killed.
        """
        return self.with_name(f".{self.name}.preparing")

    def publish_draft(self, last: str) -> None:
        """Publish the folder made there."""
        self.publish(self.draft())

    def fetched(
        self, names: Iterable[str], bring: Callable[[LocalPath, LocalPath], object], state: object
    ) -> AbstractContextManager[LocalPath]:
        """Yield a local folder with these files."""
        return nullcontext(self)

    def forget(self, state: object) -> None:
        """Delete fetched files, unless another process uses them."""

    def of_run(self, name: str) -> LocalPath:
        """Return the folder of checkpoints of the run in this folder; a bucket contains them
        directly.
        """
        return self if self.name == name else self / name

    def free_bytes(self) -> int:
        """Return the number of free bytes."""
        return shutil.disk_usage(self).free


def user_cache() -> LocalPath:
    """Return the user's cache folder."""
    return LocalPath(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "titanlite"


def crc32(blocks: Iterable[bytes]) -> int:
    """Return the checksum of a file, read in blocks."""
    checksum = 0
    for block in blocks:
        checksum = zlib.crc32(block, checksum)
    return checksum


@contextmanager
def whole_file(path: Path, draft: Path | None = None) -> Iterator[BinaryIO]:
    """Write a file that is complete or absent: it gets its name once its bytes are on disk."""
    draft = draft or path.with_name(f".{path.name}.new")
    with draft.open("wb") as file:
        yield file
    sync(draft)
    rename(draft, path)


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


def rename(path: Path, target: Path) -> None:
    """Rename a file or folder; a file with the new name is replaced."""
    path.replace(target)
    sync(target.parent)
