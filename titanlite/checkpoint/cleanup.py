"""Delete checkpoints, and what killed saves left behind. No torch."""

import re
from pathlib import Path

from titanlite.checkpoint import transfer
from titanlite.checkpoint.manifest import MANIFEST
from titanlite.runtime import store
from titanlite.runtime.bucket import is_remote

SEEN_BY_ALL = ".seen-by-all-"
"""Prefix of the file that shows whether all ranks share the folder."""


def delete(folder: Path) -> None:
    """Delete a checkpoint, its name first, so that a half-deleted one never seems complete.

    Of a link to another place, such as an archive, only the link is deleted.
    """
    if is_remote(folder):
        transfer.remove(folder)
        return
    deleted = folder.with_name(f".{folder.name}.deleted")
    store.rename(folder, deleted)
    if not deleted.is_symlink():
        store.delete(deleted / MANIFEST)
    store.delete(deleted)


def clear_leftovers(root: Path) -> list[str]:
    """Delete the leftovers of a killed save, export, deletion or start; return the names."""
    staging = r"\.(hf-)?step-\d+(\.[0-9a-f]{8})?\.staging"
    seen = rf"{re.escape(SEEN_BY_ALL)}[0-9a-f]{{32}}"
    pattern = re.compile(rf"{staging}|\.step-\d+\.deleted|{seen}")
    leftovers = []
    for name, path in sorted(store.list_folder(root).items()):
        if pattern.fullmatch(name):
            store.delete(path)
            leftovers.append(name)
    return leftovers
