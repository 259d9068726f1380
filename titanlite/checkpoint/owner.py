"""One run writes into a bucket, which has no locks. No torch.

Each manifest names the run that created it. A run commits nothing once a step is there that it
neither found at its start nor created: another run saves there. Creating a manifest never replaces
one, so that of two runs that save the same step one is refused, and the steps of both stay whole.
"""

import os
from pathlib import Path
from uuid import uuid4

from titanlite.checkpoint.manifest import MANIFEST, committed, read_manifest, step_folder
from titanlite.errors import RunFailed
from titanlite.runtime import store
from titanlite.runtime.rank_files import STARTED


class Owner:
    """This run, as the bucket's steps tell it from others; on one rank."""

    def __init__(self, root: Path, host: str) -> None:
        self._root = root
        # The same for all attempts of a launcher.
        self.name = f"{host} {os.environ.get(STARTED) or uuid4().hex}"
        self.known = {step for step in committed(root) if self._is_there(step)}
        """The steps that were there at the start, and those that this run has created."""

    def _is_there(self, step: int) -> bool:
        return store.exists(step_folder(self._root, step) / MANIFEST)

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
