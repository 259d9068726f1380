"""`titanlite checkpoint cp`: copy checkpoints between folders and object stores, verified."""

import sys
from argparse import Namespace
from dataclasses import replace

from titanlite.checkpoint import transfer
from titanlite.checkpoint.manifest import (
    MANIFEST,
    committed,
    is_complete,
    is_foreign,
    point_latest,
    read_manifest,
    step_folder,
)
from titanlite.config.checkpoint_schema import Checkpoint
from titanlite.errors import UserError, format_bytes
from titanlite.runtime.bucket import Place
from titanlite.tools.checkpoint_hf import copy_folder
from titanlite.tools.load import find_checkpoint, find_checkpoints, track_files, whole_manifest


def copy(arguments: Namespace) -> int:
    """Run the sub-command."""
    given, root = arguments.__dict__["from"], arguments.to
    if not given.is_file() and ((given / "config.json").exists() or is_foreign(given)):
        return copy_folder(given, root)
    if not committed(root):
        root = root.of_run(Checkpoint().folder)
    if not arguments.all:
        _copy(find_checkpoint(given), root)
        return 0
    damaged = False
    for source in find_checkpoints(given):
        if is_complete(source):
            _copy(source, root)
        else:
            print(f"{source}: damaged, and not copied", file=sys.stderr)
            damaged = True
    return int(damaged)


def _copy(source: Place, root: Place) -> None:
    """Copy a checkpoint into a folder of them, unless it is there."""
    from titanlite.checkpoint.commit import publish_step, staging_folder

    manifest = whole_manifest(source)
    target = step_folder(root, manifest.step)
    if transfer.is_copy(source, target):
        print(f"{source} is in {target} already, by its manifest and sizes")
        return
    if target.is_taken(MANIFEST):
        raise UserError(f"{target} exists, and is no copy of {source}; name another folder")
    target.remove()  # left in a bucket by a killed copy
    root.make()
    with staging_folder(target, None, "the copy") as staging:
        files = track_files(manifest.files.items())
        transfer.copy_files(source / manifest.attempt, staging, files)
        manifest = read_manifest(source)  # it may be gone by now; then nothing is published
        publish_step(staging, target, replace(manifest, attempt=""))
    if manifest.step == committed(root)[-1]:
        point_latest(root, manifest.step)
    base = f"; its base stays in {manifest.base.folder}" if manifest.base else ""
    print(f"{source} is now in {target}: {format_bytes(manifest.size)}, verified{base}")
