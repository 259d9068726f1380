"""Where a run saves its checkpoints, and which checkpoints a user's path stands for.

Imports no torch.
"""

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
from titanlite.runtime.bucket import Place, Uploads, place
from titanlite.runtime.store import LocalPath


def checkpoint_root(config: JobConfig) -> Place:
    """Return where a run saves, with the config's bounds of an upload."""
    given = config.checkpoint
    # Before the other ranks give up: the error names the object.
    limit = 0.9 * config.comm.checkpoint_timeout_seconds
    bounds = given.upload_parallel, given.part_mib << 20, given.stall_timeout_seconds
    return place(root_name(config), uploads=Uploads(*bounds, limit))


def root_name(config: JobConfig) -> str:
    """Return the same as a path or URL, without opening a bucket."""
    return _inside(LocalPath(config.job.dump_folder), config.checkpoint.folder)


def _inside(dump_folder: Place, folder: str) -> str:
    return folder if is_url(folder) else f"{dump_folder / folder}"


def saved_root(dump_folder: Place) -> str:
    """Return where the run in a dump folder saves its checkpoints, by its config."""
    try:
        folder = tomllib.loads((dump_folder / CONFIG).read_bytes().decode())["checkpoint"]["folder"]
        return _inside(dump_folder, folder)
    except (OSError, ValueError, LookupError, TypeError):  # no config, or not that of a run
        return f"{dump_folder}/checkpoint"


def newest_of(path: Place) -> Place:
    """Return the newest of a place's checkpoints, or the place itself if it has none.

    An incomplete one, left by another program, counts only if there is no other.
    """
    found = [path, *checkpoints_of(path)]
    return next((each for each in reversed(found[1:]) if not is_torn(each)), found[-1])


def checkpoints_of(path: Place) -> list[Place]:
    """Return a checkpoint, or those of a folder or a run, oldest first."""
    if (path / MANIFEST).exists() or (step_of(path.name) is not None and path.exists()):
        return [path]
    for root in map(place, (f"{path}", saved_root(path), f"{path}/checkpoint")):
        steps = committed(root)
        if steps:
            return [step_folder(root, step) for step in steps]
    return []
