"""Checkpoints on object stores: copied file by file, verified on the way, with the manifest last.

A step exists exactly if its manifest does. No torch.
"""

import fcntl
import hashlib
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from titanlite.checkpoint.manifest import (
    CONFIG,
    MANIFEST,
    CorruptCheckpoint,
    File,
    Manifest,
    committed,
    is_complete,
    named_latest,
    read_manifest,
    step_folder,
)
from titanlite.observe.run_folder import METRICS
from titanlite.runtime import store
from titanlite.runtime.bucket import BucketError, is_remote

_IN_USE = ".in-use"


def steps(root: Path) -> list[int]:
    """Return the steps in a place; raise if the listing lacks the step that `latest` names although
    it exists.
    """
    found = committed(root)
    newest = named_latest(root)
    if newest is not None and newest not in found:
        folder = step_folder(root, newest)
        if store.exists(folder / MANIFEST):
            listed = f"step-{found[-1]}" if found else "nothing"
            raise BucketError(
                f"{root} lists {listed} as the newest, but has {folder.name}; start again"
            )
    return found


def copy_records(outer: Path, root: Path) -> None:
    """Copy the metrics and the config of a run to a bucket."""
    for name in (METRICS, CONFIG):
        if store.exists(outer / name):
            store.copy(outer / name, root / name)


def fetch_metrics(root: Path, outer: Path) -> None:
    """Copy the metrics of a run from a bucket, if the dump folder has none."""
    if not store.exists(outer / METRICS) and store.exists(root / METRICS):
        store.copy(root / METRICS, outer / METRICS)


def share_of(manifest: Manifest, rank: int, ranks: int) -> list[str]:
    """Return the files of tensors that a rank fetches; on as many ranks as wrote them, its own."""
    files = sorted(manifest.files, key=lambda name: (len(name), name))
    files = [name for name in files if name.endswith(".safetensors")]
    return [name for at, name in enumerate(files) if at * ranks // len(files) == rank]


@contextmanager
def fetched(step: Path, manifest: Manifest, names: Iterable[str]) -> Iterator[Path]:
    """Yield a folder with files of a checkpoint: the checkpoint itself, or a cache if it is in a
    bucket. The cache is filled once for all processes of a node, verified, and kept while one of
    them uses it.
    """
    if not is_remote(step):
        yield step
        return
    source = step / manifest.attempt
    folder = _cache_of(step, manifest)
    store.make_folder(folder)
    with _locked(folder / _IN_USE, fcntl.LOCK_SH):
        for name in names:
            with _locked(folder / f".{name}.lock", fcntl.LOCK_EX):
                if not store.exists(folder / name):
                    draft = folder / f".{name}.part"
                    _copy_file(source / name, draft, manifest.files[name])
                    draft.rename(folder / name)
        yield folder


def forget(step: Path, manifest: Manifest) -> None:
    """Delete fetched files, unless another process uses them."""
    if not is_remote(step):
        return
    folder = _cache_of(step, manifest)
    with suppress(OSError), _locked(folder / _IN_USE, fcntl.LOCK_EX | fcntl.LOCK_NB):
        store.delete(folder)


def _cache_of(step: Path, manifest: Manifest) -> Path:
    name = hashlib.sha256(f"{step} {zlib.crc32(manifest.render())}".encode()).hexdigest()[:16]
    return store.user_cache() / "checkpoints" / name


@contextmanager
def _locked(path: Path, kind: int) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, kind)
        yield


def copy_files(source: Path, target: Path, files: Iterable[tuple[str, File]]) -> None:
    """Copy files of a checkpoint; raise for one that differs from its manifest."""
    for name, file in files:
        _copy_file(source / name, target / name, file)


def _copy_file(path: Path, target: Path, file: File) -> None:
    if store.copy(path, target) != (file.size, file.crc32):
        raise CorruptCheckpoint(f"{path}: damaged, it differs from the manifest")


def is_copy(source: Path, target: Path) -> bool:
    """Return whether a folder has all files of a checkpoint, at their recorded sizes, and its
    manifest.
    """
    return is_complete(target) and flat_manifest(target) == flat_manifest(source)


def flat_manifest(folder: Path) -> bytes:
    """Return the manifest of a copy, which has its files next to it."""
    manifest = read_manifest(folder)
    if manifest.attempt:
        return replace(manifest, attempt="").render()
    return store.read(folder / MANIFEST)


def remove(folder: Path) -> None:
    """Remove a step from a bucket, its manifest first."""
    (folder / MANIFEST).unlink(missing_ok=True)
    store.delete(folder)
