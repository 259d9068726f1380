"""Where a run saves its checkpoints. No torch."""

import math
from pathlib import Path

from titanlite.config.schema import JobConfig
from titanlite.runtime.bucket import Uploads, place


def checkpoint_root(config: JobConfig) -> Path:
    folder = config.checkpoint.folder
    return store_of(config, folder) if "://" in folder else Path(config.job.dump_folder, folder)


def store_of(config: JobConfig, url: str) -> Path:
    """Return a place to save into, with the config's bounds of an upload."""
    given, limit = config.checkpoint, math.inf
    if url == given.folder:  # before the other ranks give up: the error names the object
        limit = 0.9 * config.comm.checkpoint_timeout_seconds
    bounds = given.upload_parallel, given.part_mib << 20, given.stall_timeout_seconds
    return place(url, uploads=Uploads(*bounds, limit))
