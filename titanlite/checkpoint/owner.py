"""Ensure that only one run writes to a bucket, which has no locks. Imports no torch.

Each manifest names the run that created it. A run stops committing if there is a step that it
neither found at its start nor created, since another run must be saving there. Creating a manifest
never replaces one: if two runs save the same step, one is refused, and the steps of both stay
intact.
"""

import os
import re
from collections.abc import Iterable
from uuid import uuid4

from titanlite.checkpoint.manifest import (
    MANIFEST,
    CorruptCheckpoint,
    committed,
    read_manifest,
    step_folder,
)
from titanlite.checkpoint.transfer import steps
from titanlite.errors import RunFailed
from titanlite.runtime.bucket import Place, copy_file
from titanlite.runtime.rank_files import STARTED

ASIDE = f"{MANIFEST}.aside"
"""Name of the manifest of a step that a run has set aside: it is no longer found, and renaming the
object restores it."""


class Owner:
    """This run, as distinguished from others in the bucket; on rank 0."""

    def __init__(self, root: Place, host: str) -> None:
        self._root = root
        # STARTED is the same for all attempts of a launcher.
        self.name = f"{host} {os.environ.get(STARTED) or uuid4().hex}"
        self._found = steps(root)
        self.known = set(filter(self._is_there, self._found))
        """The steps found at the start, and those that this run has created."""

    def _is_there(self, step: int) -> bool:
        """Ask for a manifest by its name: a list may be empty by mistake."""
        return (step_folder(self._root, step) / MANIFEST).exists()

    def require_alone(self) -> None:
        """Raise if another run has created a step since this one started."""
        for step in filter(self._is_there, {*committed(self._root)} - self.known):
            folder = step_folder(self._root, step)
            name = read_manifest(folder, outline=True).run
            if name != self.name:
                raise RunFailed(
                    f"{folder} was saved by another run ({name}) after this one ({self.name}) had "
                    "started: nothing more is committed here; end one of the two, or give it "
                    "another checkpoint.folder"
                )
            self.known.add(step)

    def set_aside(self, later_steps: Iterable[int]) -> None:
        """Set steps aside by renaming their manifests."""
        for step in later_steps:
            manifest = step_folder(self._root, step) / MANIFEST
            if manifest.exists():
                copy_file(manifest, manifest.parent / ASIDE)
                manifest.remove()
        self.known -= {*later_steps}

    def remove_leftovers(self) -> list[str]:
        """Remove what killed saves left behind before the start; return the names.

        Parts of later steps than the newest stay, since they may belong to a run in progress.
        """
        names = []
        for step in self._found:
            if step > max(self.known, default=-1):
                break
            folder = step_folder(self._root, step)
            for name, path in self._dead_parts(step, folder).items():
                path.remove()
                names.append(name)
        return names

    def _dead_parts(self, step: int, folder: Place) -> dict[str, Place]:
        """Return the folders that no manifest names, of a step or all of it."""
        if step not in self.known:
            return {} if (folder / ASIDE).exists() else {folder.name: folder}
        try:
            kept = read_manifest(folder, outline=True).attempt
        except CorruptCheckpoint:
            return {}
        return {
            f"{folder.name}/{name}": path
            for name, path in folder.entries().items()
            if re.fullmatch("[0-9a-f]{8}", name) and name != kept
        }
