"""Whether all ranks write into the same folder, and what killed saves left there."""

import os
import re
import time
import uuid

import torch.distributed as dist

from titanlite.errors import UserError
from titanlite.runtime import lock
from titanlite.runtime.cluster import RankInfo
from titanlite.runtime.distributed import gather_objects
from titanlite.runtime.store import LocalPath

SEEN_BY_ALL = ".seen-by-all-"
"""Prefix of the file that shows whether all ranks share the folder."""
_PATIENCE_SECONDS = 5
"""Time for a new file in a network folder to appear on other nodes."""


def require_shared(root: LocalPath, rank_info: RankInfo, group: dist.ProcessGroup | None) -> bool:
    """Make the folder of checkpoints; raise UserError if the ranks do not share it.

    Return whether this is rank 0 and the folder has locks.
    """
    on_rank_0 = rank_info.rank == 0
    name = f"{SEEN_BY_ALL}{uuid.uuid4().hex}"
    probe = root / gather_objects(name, group)[0]
    failure = ""
    if on_rank_0:
        try:
            root.make()
            probe.put(b"")
        except OSError as error:
            failure = f"checkpoint.folder {root}: nothing can be written there ({error.strerror})"
    failure = gather_objects(failure, group)[0]
    if failure:
        raise UserError(failure)
    usable = _appears(probe) and os.access(root, os.W_OK)
    ranks = gather_objects((rank_info.host, usable), group)
    has_locks = on_rank_0 and lock.works_on(probe)
    if on_rank_0:
        probe.remove()
    unusable = [f"rank {rank} on {host}" for rank, (host, usable) in enumerate(ranks) if not usable]
    if not unusable:
        return has_locks
    shown = ", ".join(unusable[:4])
    if len(unusable) > 4:
        shown += " and others"
    raise UserError(
        f"checkpoint.folder {root} (on rank 0's host {ranks[0][0]}) is not writable from {shown}: "
        "all ranks write to one folder, so job.dump_folder must be on shared storage"
    )


def _appears(file: LocalPath) -> bool:
    """Wait for another node's file."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not file.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def clear_leftovers(root: LocalPath) -> list[str]:
    """Delete the leftovers of a killed save, export, deletion or start; return the names."""
    staging = r"\.(hf-)?step-\d+(\.[0-9a-f]{8})?\.staging"
    seen = rf"\.?{re.escape(SEEN_BY_ALL)}[0-9a-f]{{32}}(\.new)?"
    pattern = re.compile(rf"{staging}|\.step-\d+\.deleted|{seen}")
    leftovers = []
    for name, path in sorted(root.entries().items()):
        if pattern.fullmatch(name):
            path.remove()
            leftovers.append(name)
    return leftovers
