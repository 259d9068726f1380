"""Whether all ranks write into the same folder."""

import time
import uuid
from pathlib import Path

import torch.distributed as dist

from titanlite.checkpoint.cleanup import SEEN_BY_ALL
from titanlite.errors import UserError
from titanlite.runtime import lock, store
from titanlite.runtime.cluster import RankInfo
from titanlite.runtime.distributed import gather_objects

_PATIENCE_SECONDS = 5
"""A network folder may show a new file late on another node."""


def require_shared(root: Path, rank_info: RankInfo, group: dist.ProcessGroup | None) -> bool:
    """Make the folder of checkpoints; raise UserError if the ranks do not share it.

    Return whether this is rank 0 and the folder has locks.
    """
    on_rank_0 = rank_info.rank == 0
    name = f"{SEEN_BY_ALL}{uuid.uuid4().hex}"
    probe = root / gather_objects(name, group)[0]
    failure = ""
    if on_rank_0:
        try:
            store.make_folder(root)
            store.write(probe, b"")
        except OSError as error:
            failure = f"checkpoint.folder {root}: nothing can be written there ({error.strerror})"
    if failure := gather_objects(failure, group)[0]:
        raise UserError(failure)
    usable = _appears(probe) and store.is_writable(root)
    ranks = gather_objects((rank_info.host, usable), group)
    has_locks = on_rank_0 and lock.works_on(probe)
    if on_rank_0:
        store.delete(probe)
    unusable = [f"rank {rank} on {host}" for rank, (host, usable) in enumerate(ranks) if not usable]
    if not unusable:
        return has_locks
    shown = ", ".join(unusable[:4])
    if len(unusable) > 4:
        shown += " and others"
    raise UserError(
        f"checkpoint.folder {root} (on rank 0's host {ranks[0][0]}) is not writable from {shown}: "
        "all ranks write into one folder, so job.dump_folder must be on shared storage"
    )


def _appears(file: Path) -> bool:
    """Wait for another node's file."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not store.exists(file):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
