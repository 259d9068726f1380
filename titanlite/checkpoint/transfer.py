"""Checkpoints on object stores: copied file by file, verified on the way, with the manifest last.

A step exists exactly if its manifest does. Imports no torch.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import replace

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
from titanlite.runtime.bucket import BucketError, Place, copy_file
from titanlite.runtime.store import LocalPath, crc32


def steps(root: Place) -> list[int]:
    """Return the steps in a place. A listing that lacks the step named by `latest` is not trusted
    if that step exists.
    """
    found = committed(root)
    newest = named_latest(root)
    if newest is not None and newest not in found:
        folder = step_folder(root, newest)
        if (folder / MANIFEST).exists():
            listed = f"step-{found[-1]}" if found else "nothing"
            raise BucketError(
                f"{root} lists {listed} as the newest, but has {folder.name}; start again"
            )
    return found


def copy_records(outer: Place, root: Place) -> None:
    """Copy the metrics and the config of a run into a bucket."""
    for name in (METRICS, CONFIG):
        if (outer / name).exists():
            copy_file(outer / name, root / name)


def fetch_metrics(root: Place, outer: Place) -> None:
    """Copy the metrics of a run from a bucket, if the dump folder has none."""
    if not (outer / METRICS).exists() and (root / METRICS).exists():
        copy_file(root / METRICS, outer / METRICS)


def share_of(manifest: Manifest, rank: int, ranks: int) -> list[str]:
    """Return the files of tensors that a rank fetches: its own, if as many ranks read as wrote."""
    files = sorted(manifest.files, key=lambda name: (len(name), name))
    files = [name for name in files if name.endswith(".safetensors")]
    return [name for at, name in enumerate(files) if at * ranks // len(files) == rank]


def fetched(
    step: Place, manifest: Manifest, names: Iterable[str]
) -> AbstractContextManager[LocalPath]:
    """Yield a local folder with files of a checkpoint, verified if they are fetched."""

    def bring(path: Place, draft: LocalPath) -> None:
        _copy_file(path, draft, manifest.files[path.name])

    return (step / manifest.attempt).fetched(names, bring, manifest.files)


def mismatches(step: Place, manifest: Manifest, names: Iterable[str]) -> list[str]:
    """Return the faults in the bytes of files; fetched files stay until they are read."""
    with fetched(step, manifest, names) as folder:
        return [
            f"{folder / name}: checksum mismatch"
            for name in names
            if crc32((folder / name).blocks()) != manifest.files[name].crc32
        ]


def forget(step: Place, manifest: Manifest) -> None:
    """Delete fetched files, unless another process uses them."""
    (step / manifest.attempt).forget(manifest.files)


def copy_files(source: Place, target: Place, files: Iterable[tuple[str, File]]) -> None:
    """Copy files of a checkpoint; raise for one that differs from its manifest."""
    for name, file in files:
        _copy_file(source / name, target / name, file)


def _copy_file(path: Place, target: Place, file: File) -> None:
    if copy_file(path, target) != (file.size, file.crc32):
        raise CorruptCheckpoint(f"{path}: damaged, it differs from the manifest")


def is_copy(source: Place, target: Place) -> bool:
    """Return whether a folder has all files of a checkpoint, at their recorded sizes, and its
    manifest."""
    return is_complete(target) and flat_manifest(target) == flat_manifest(source)


def flat_manifest(folder: Place) -> bytes:
    """Return the manifest of a copy, which has its files next to it."""
    manifest = read_manifest(folder)
    if manifest.attempt:
        return replace(manifest, attempt="").render()
    return (folder / MANIFEST).read_bytes()
