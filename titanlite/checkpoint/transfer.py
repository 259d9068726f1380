"""Checkpoints on object stores: copied file by file, verified on the way, and the manifest last.

A step is there exactly when its manifest is. No torch.
"""

from collections.abc import Iterable
from pathlib import Path

from titanlite.checkpoint.manifest import (
    MANIFEST,
    CorruptCheckpoint,
    File,
    committed,
    faults,
    is_complete,
    read_manifest,
    step_folder,
)
from titanlite.errors import some_of
from titanlite.runtime import store

ASIDE = f"{MANIFEST}.aside"
"""The manifest of a step that a run has left behind: nobody finds it by itself, and renaming the
object brings it back."""


def copy_files(source: Path, target: Path, files: Iterable[tuple[str, File]]) -> None:
    """Copy files of a checkpoint; raise for one that differs from its manifest."""
    for name, file in files:
        if store.copy(source / name, target / name) != (file.size, file.crc32):
            raise CorruptCheckpoint(f"{source / name}: damaged, it differs from the manifest")


def begin(source: Path, target: Path) -> bool:
    """Make room for a step in a bucket; return whether it is there already."""
    if is_complete(target) and store.read(target / MANIFEST) == store.read(source / MANIFEST):
        return True
    remove(target)
    return False


def end(source: Path, target: Path) -> None:
    """Put the manifest of a step whose files are in the bucket."""
    manifest = read_manifest(source, outline=True)  # it may be gone by now: then nothing is put
    if problems := faults(target, manifest):
        raise CorruptCheckpoint(f"{target} is not as it was written:{some_of(problems)}")
    store.copy(source / MANIFEST, target / MANIFEST)


def remove(folder: Path) -> None:
    """Remove a step from a bucket, its manifest first."""
    (folder / MANIFEST).unlink(missing_ok=True)
    for path in store.list_folder(folder).values():
        path.unlink(missing_ok=True)


def set_aside(root: Path, after: int) -> list[int]:
    """Take the manifests from steps in a bucket after this one; return the steps."""
    steps = []
    for step in committed(root):
        manifest = step_folder(root, step) / MANIFEST
        if step > after and store.exists(manifest):
            store.copy(manifest, manifest.parent / ASIDE)
            manifest.unlink()
            steps.append(step)
    return steps


def remove_leftovers(root: Path) -> list[str]:
    """Remove from a bucket what a killed upload left; return the names."""
    names = []
    for step in committed(root):
        folder = step_folder(root, step)
        # Asked for by name: a list may be empty by mistake.
        if not any(store.exists(folder / name) for name in (MANIFEST, ASIDE)):
            remove(folder)
            names.append(folder.name)
    return names
