"""Where a run saves its checkpoints, and which checkpoints a user's path stands for. No torch."""

from pathlib import Path

from titanlite.checkpoint.manifest import (
    CONFIG,
    MANIFEST,
    committed,
    is_torn,
    step_folder,
    step_of,
)
from titanlite.config.schema import JobConfig
from titanlite.config.toml import tomllib
from titanlite.config.urls import is_url
from titanlite.runtime import store
from titanlite.runtime.bucket import Uploads, place


def checkpoint_root(config: JobConfig) -> Path:
    """Return where a run saves; for a bucket, with the config's limits of uploads."""
    given = config.checkpoint
    if not is_url(given.folder):
        return Path(config.job.dump_folder, given.folder)
    # End before the other ranks give up, since this error names the object.
    limit = 0.9 * config.comm.checkpoint_timeout_seconds
    bounds = given.upload_parallel, given.part_mib << 20, given.stall_timeout_seconds
    return place(given.folder, uploads=Uploads(*bounds, limit))


def saved_root(dump_folder: Path) -> str:
    """Return where the run in a dump folder saves its checkpoints, according to its config."""
    try:
        folder = tomllib.loads(store.read(dump_folder / CONFIG).decode())["checkpoint"]["folder"]
        return folder if is_url(folder) else f"{dump_folder / folder}"
    except (OSError, ValueError, LookupError, TypeError):  # no config, or not that of a run
        return f"{dump_folder}/checkpoint"


def newest_of(path: Path) -> Path:
    """Return the newest checkpoint of a place, or the place itself if it has none.

    An incomplete one, left by another program, counts only if there is no other.
    """
    found = [path, *checkpoints_of(path)]
    return next((each for each in reversed(found[1:]) if not is_torn(each)), found[-1])


def checkpoints_of(path: Path) -> list[Path]:
    """Return a checkpoint, or those of a folder or a run, oldest first."""
    if store.exists(path / MANIFEST) or (step_of(path.name) is not None and store.exists(path)):
        return [path]
    for root in map(place, (f"{path}", saved_root(path), f"{path}/checkpoint")):
        steps = committed(root)
        if steps:
            return [step_folder(root, step) for step in steps]
    return []
