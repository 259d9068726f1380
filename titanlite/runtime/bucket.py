"""Object stores, accessed by obstore; `place` returns for a URL what LocalPath is for a folder.

An object is either complete or absent, and nothing is renamed. Every request is bounded in time. A
forked process must not use a store, since both it and its parent would hang.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from types import SimpleNamespace
from typing import Any, TypeAlias
from uuid import uuid4

from titanlite.config.urls import LEGAL_URLS, is_url, split_url
from titanlite.errors import OK, UserError, print_notice
from titanlite.runtime.store import LocalPath, user_cache
from titanlite.runtime.store_credentials import options_of
from titanlite.runtime.store_errors import NO_BUCKET, WHOLE, BucketError, Unreachable, explain

_PATIENCE_SECONDS: float = 60
_TIMEOUT: float = 30  # of one request; less than for all retries, so that a stall is retried
_RANGE = 32 << 20  # of a download, since a single request would have only the time of one
_MOST_PARTS = 9_000  # stores allow 10,000
_SLOWEST = 2 << 20  # minimum bytes per second of an upload
_IN_USE = ".in-use"


@dataclass(frozen=True)
class Uploads:
    """How an object is stored."""

    parallel: int = 4
    """Parts in flight at once."""
    part: int = 16 << 20
    """Bytes of a part, and of the largest object sent in one request; more if there would be too
    many parts.
    """
    timeout: float = 0
    """Seconds after which an unanswered part is sent again; 0 means as for any request."""
    limit: float = math.inf
    """Time limit for an object, in seconds."""


class Bucket:
    """A bucket or container, such as s3://NAME, usable only in the process that opened it."""

    def __init__(self, url: str, patience: float, uploads: Uploads) -> None:
        """Find the credentials, without a request to the store."""
        self.url = url
        self._settings = uploads
        try:
            from obstore.store import from_url
        except ImportError:
            raise BucketError(f'{url}: pip install "titanlite[remote]" for object stores') from None
        options = options_of(url)
        second = timedelta(seconds=1)
        backoff = {"init_backoff": 0.2 * second, "max_backoff": 2 * second, "base": 2}

        def client(timeout: float, patience: float) -> Any:
            limits = {"timeout": timeout * second, "connect_timeout": "3s", "allow_http": True}
            # Retries are limited by time, since a count would give up on a busy store after a
            # second.
            retry = {"max_retries": 1000, "retry_timeout": patience * second, "backoff": backoff}
            return from_url(url, client_options=limits, retry_config=retry, **options)

        with self.explained():
            self._store = client(_TIMEOUT, patience)
            self._uploads = client(uploads.timeout or _TIMEOUT, max(patience, 2 * uploads.timeout))
        self._pid = os.getpid()

    @contextmanager
    def explained(self, key: str = "") -> Iterator[None]:
        from obstore.exceptions import BaseError

        url = f"{self.url}/{key}".rstrip("/")
        try:
            yield
        except BaseError as error:
            raise explain(url, error) from None
        except FileNotFoundError as error:  # also of a file that is sent, or of the bucket
            if any(mark in str(error) for mark in NO_BUCKET):
                raise explain(self.url, error) from None
            raise

    def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of the store."""
        if os.getpid() != self._pid:
            raise RuntimeError(f"{self.url} was opened before a fork, and would hang: use spawn")
        store = self._uploads if name == "put_async" else self._store
        with self.explained():
            return getattr(store, name)(*arguments, **options)

    def put(self, key: str, blocks: Iterable[bytes | memoryview], size: int) -> None:
        """Store an object of about this size from blocks, which must not change later."""
        import asyncio  # late: most processes use no store

        given = self._settings
        part = max(given.part, size // _MOST_PARTS)
        # A small object takes one request instead of three, and a large block would send all parts
        # at once.
        content = _pieces(blocks, part) if size > part else b"".join(blocks)
        options = {"chunk_size": part, "max_concurrency": given.parallel}
        tries = max(2 * _PATIENCE_SECONDS, 4 * given.timeout)
        limit = min(given.limit, tries + size / _SLOWEST)

        async def put() -> None:
            await asyncio.wait_for(self.call("put_async", key, content, **options), limit)

        before = self._version(key) if size > part else None
        with self.explained(key):
            try:
                asyncio.run(put())
            except asyncio.TimeoutError:
                why = f"{size:,} bytes took more than {limit:.0f} s"
                raise Unreachable(f"{self.url}/{key}: {why}") from None
            except Exception:
                # The answer to the last request of an upload may get lost. az and gs refuse the
                # repeated request although the object exists.
                stored = False
                with suppress(BucketError):
                    stored = size > part and self._version(key) != before
                if not stored:
                    raise

    def _version(self, key: str) -> Any:
        with suppress(FileNotFoundError):
            entry = self.call("head", key)
            return entry["e_tag"], entry["version"]

    def put_if_absent(self, key: str, content: bytes) -> bool:
        """Store a small object if there is none; return False if another writer was first.

        The content must be unique to this call: if the answer gets lost, the repeated request is
        refused, and only the content tells who was first.
        """
        for tries_left in reversed(range(3)):
            try:
                self.call("put", key, content, mode="create")
                return True
            except BucketError:
                with suppress(FileNotFoundError), self.explained():
                    return bytes(self.call("get", key).bytes()) == content
                if not tries_left:
                    raise
        return False

    def read_range(self, key: str, start: int, size: int) -> tuple[bytes, Any]:
        """Return bytes of an object, and its metadata."""
        with self.explained():
            found = self.call("get", key, options={"range": (start, start + size)})
            return found.bytes(), found.meta

    def blocks(self, key: str) -> Iterator[bytes]:
        """Yield the content of an object, all from one version."""
        with self.explained():
            found = self.call("get", key)
            size, tag = found.meta["size"], found.meta["e_tag"]
            if size <= _RANGE:
                yield found.bytes()
                return
        del found  # nothing is read
        try:
            for start in range(0, size, _RANGE):
                content, entry = self.read_range(key, start, min(_RANGE, size - start))
                if entry["e_tag"] != tag:
                    raise BucketError(f"{self.url}/{key} changed while it was read")
                yield content
        except BucketError as error:
            if WHOLE not in error.why:
                raise
            with self.explained(key):
                yield from self.call("get", key).stream()


def _pieces(blocks: Iterable[bytes | memoryview], size: int) -> Iterator[memoryview]:
    for block in blocks:
        for start in range(0, len(block), size):
            yield memoryview(block)[start : start + size]


@dataclass(frozen=True)
class BucketPath:
    """A place in a bucket, with the methods of LocalPath that checkpoints and shards need."""

    bucket: Bucket
    key: str
    entry: Any = field(default=None, compare=False)
    """The listing of an object."""
    renames = False

    def __str__(self) -> str:
        return f"{self.bucket.url}/{self.key}".rstrip("/")

    def __truediv__(self, name: str) -> BucketPath:
        return BucketPath(self.bucket, f"{self.key}/{name}".strip("/"))

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> BucketPath:
        return BucketPath(self.bucket, self.key.rpartition("/")[0])

    def absolute(self) -> BucketPath:
        return self

    def iterdir(self) -> Iterator[BucketPath]:
        found = self.bucket.call("list_with_delimiter", self.key)
        for key in found["common_prefixes"]:
            yield BucketPath(self.bucket, key)
        for entry in found["objects"]:
            yield BucketPath(self.bucket, entry["path"], entry)

    def entries(self) -> dict[str, BucketPath]:
        return {path.name: path for path in self.iterdir()}

    def is_dir(self) -> bool:
        return self.entry is None and any(self.iterdir())

    def is_file(self) -> bool:
        try:
            return bool(self.key and self.stat())
        except FileNotFoundError:
            return False

    def exists(self) -> bool:
        return self.is_file() or self.is_dir()

    def stat(self) -> Any:
        entry = self.entry or self.bucket.call("head", self.key)
        return SimpleNamespace(st_size=entry["size"], st_mtime=entry["last_modified"].timestamp())

    def read_bytes(self) -> bytes:
        return b"".join(self.bucket.blocks(self.key))

    def local(self) -> LocalPath:
        raise UserError(
            f"{self} must be a folder here: `titanlite checkpoint cp URL FOLDER` copies from one"
        )

    def blocks(self) -> Iterator[bytes]:
        return self.bucket.blocks(self.key)

    def put(self, content: bytes) -> None:
        self.bucket.put(self.key, [content], len(content))

    def put_blocks(self, blocks: Iterable[bytes | memoryview], size: int) -> tuple[int, int]:
        taken = checksum = 0

        def counted() -> Iterator[bytes | memoryview]:
            nonlocal taken, checksum
            for block in blocks:
                taken += len(block)
                checksum = zlib.crc32(block, checksum)
                yield block

        self.bucket.put(self.key, counted(), size)
        return taken, checksum

    def make(self) -> None: ...

    def unlink(self) -> None:
        with suppress(FileNotFoundError):  # az and gs report this, s3 does not
            self.bucket.call("delete", self.key)

    def remove(self) -> None:
        """Delete an object, or a folder, which some stores list even if it is empty."""
        with self.bucket.explained():
            found = [entry for part in self.bucket.call("list", self.key) for entry in part]
        inside = [BucketPath(self.bucket, entry["path"]) for entry in found]
        with suppress(FileNotFoundError):
            self.bucket.call("delete", [path.key for path in inside])
        for path in sorted({self, *(p.parent for p in inside)}, key=str, reverse=True):
            path.unlink()

    def is_taken(self, last: str) -> bool:
        return (self / last).is_file()

    def staging(self, token: str) -> BucketPath:
        return self / token

    def discard(self) -> None:
        """Keep the folder, since the answer to its last file may have been lost."""

    def publish(self, staging: Any, last: str = "", content: bytes = b"") -> None:
        if not self.bucket.put_if_absent((self / last).key, content):
            raise FileExistsError(f"{self / last} was put there by another run")

    def withdraw(self, last: str) -> None:
        (self / last).unlink()
        self.remove()

    def draft(self) -> LocalPath:
        return user_cache() / f"preparing-{_hash(self)}"

    def publish_draft(self, last: str) -> None:
        draft = self.draft()
        content = (draft / last).read_bytes()
        (draft / last).remove()
        copy_below(draft, self)
        (self / last).put(content)
        draft.remove()

    @contextmanager
    def fetched(
        self, names: Iterable[str], bring: Callable[[BucketPath, LocalPath], object], state: object
    ) -> Iterator[LocalPath]:
        """Download files once for all processes of a node, which recognize them by the folder's
        state; they stay while a process uses them.
        """
        folder = self._cache(state)
        folder.make()
        with _locked(folder / _IN_USE, fcntl.LOCK_SH):
            for name in names:
                with _locked(folder / f".{name}.lock", fcntl.LOCK_EX):
                    if not (folder / name).exists():
                        draft = folder / f".{name}.part"
                        bring(self / name, draft)
                        draft.rename(folder / name)
            yield folder

    def forget(self, state: object) -> None:
        folder = self._cache(state)
        with suppress(OSError), _locked(folder / _IN_USE, fcntl.LOCK_EX | fcntl.LOCK_NB):
            folder.remove()

    def _cache(self, state: object) -> LocalPath:
        return user_cache() / "checkpoints" / _hash(f"{self} {state}")

    def of_run(self, name: str) -> BucketPath:
        return self

    def free_bytes(self) -> int:
        return sys.maxsize


@contextmanager
def _locked(path: LocalPath, kind: int) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, kind)
        yield


def _hash(of: object) -> str:
    return hashlib.sha256(f"{of}".encode()).hexdigest()[:16]


Place: TypeAlias = LocalPath | BucketPath
"""Where files are; code may use only what both kinds have."""


def place(text: str, patience: float = 0, uploads: Uploads = Uploads()) -> Place:
    """Return the place that a path or a URL names."""
    return bucket_path(text, patience, uploads) if is_url(text) else LocalPath(text)


def bucket_path(url: str, patience: float = 0, uploads: Uploads = Uploads()) -> BucketPath:
    """Return the place that a URL names."""
    if not (found := split_url(url)):
        raise BucketError(f"{url}: legal: {LEGAL_URLS}")
    bucket, key = found
    return BucketPath(_open(bucket, patience or _PATIENCE_SECONDS, uploads), key)


def copy_file(path: Place, target: Place) -> tuple[int, int]:
    """Copy a file; return the size and checksum of the copy."""
    return target.put_blocks(path.blocks(), path.stat().st_size)


def copy_below(folder: Place, target: Place) -> None:
    """Copy the files in a folder and below."""

    def files_below(folder: Place, target: Place) -> Iterator[tuple[Place, Place]]:
        target.make()
        for name, path in folder.entries().items():
            if path.is_dir():
                yield from files_below(path, target / name)
            else:
                yield path, target / name

    files = list(files_below(folder, target))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda pair: copy_file(*pair), files))


@cache
def _open(url: str, patience: float, uploads: Uploads) -> Bucket:
    return Bucket(url, patience, uploads)


def local_folder(text: str) -> LocalPath:
    """Return a local folder; raise for a URL."""
    if is_url(text):
        raise UserError(f"{text}: legal: a folder here, which the store's own command can upload")
    return LocalPath(text)


def check(url: str, patience: float = 5) -> None:
    """Raise unless this process may list, write, read and delete there, and the store can refuse to
    overwrite objects.
    """
    root = bucket_path(url, patience)
    probe = root / f".probe-{uuid4().hex}"
    what = "list"
    try:
        root.is_dir()
        what = "write"
        probe.put(b"titanlite")
        overwrites = probe.bucket.put_if_absent(probe.key, uuid4().bytes)
        what = "read"
        try:
            probe.bucket.read_range(probe.key, 1, 2)
        except BucketError as error:
            if WHOLE not in error.why:
                raise
        what = "delete"
        probe.unlink()
    except BucketError as error:
        error.why += f" (asked to {what})"
        raise
    if overwrites:
        raise BucketError(
            f"{url}: the store overwrites what it was asked to keep, so that two runs "
            "would mix there; legal: a folder, from which checkpoint.after_save copies"
        )


def in_own_process(module: str, *arguments: str) -> str:
    """Run a module that uses a store in another process, for a launcher, which forks and so must
    not use one; return what the module prints.
    """
    result = subprocess.run(
        [sys.executable, "-m", module, *arguments], capture_output=True, text=True
    )
    if result.returncode:
        kind = Unreachable if result.returncode == Unreachable.code else BucketError
        raise kind(result.stderr.strip().removeprefix("titanlite: "))
    return result.stdout.strip()


def main(function: Callable[[str], object], url: str) -> int:
    """Call a function with a URL, for `in_own_process`; print its result or its error."""
    try:
        print(function(url) or "")
    except BucketError as error:
        print_notice(str(error))
        return error.code
    return OK
