"""Check that all ranks write to the same folder."""

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
"""Time for a new file in a network folder to appear on other nodes."""


def require_shared(root: Path, rank_info: RankInfo, group: dist.ProcessGroup | None) -> bool:
    """Create the folder of checkpoints; raise UserError if the ranks do not share it.

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
    failure = gather_objects(failure, group)[0]
    if failure:
        raise UserError(failure)
    usable = _appears(probe) and store.is_writable(root)
    ranks = gather_objects((rank_info.host, usable), group)
    has_locks = on_rank_0 and lock.works_on(probe)
    if on_rank_0:
        store.delete(probe)
    unusable = []
    for rank, (host, is_usable) in enumerate(ranks):
        if not is_usable:
            unusable.append(f"rank {rank} on {host}")
    if not unusable:
        return has_locks
    shown = ", ".join(unusable[:4])
    if len(unusable) > 4:
        shown += " and others"
    raise UserError(
        f"checkpoint.folder {root} (on rank 0's host {ranks[0][0]}) is not writable from {shown}: "
        "all ranks write to one folder, so job.dump_folder must be on shared storage"
    )


def _appears(file: Path) -> bool:
    """Wait for another node's file; return whether it appeared."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not store.exists(file):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
