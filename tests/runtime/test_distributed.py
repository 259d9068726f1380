"""Timeouts of collectives reach every group, but for the one that is excluded."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from titanlite.layout import Layout
from titanlite.parallel.mesh import build_mesh
from titanlite.runtime import torch_private
from titanlite.runtime.distributed import set_collective_timeout


def timeouts(layout: Layout) -> tuple[set[timedelta], timedelta, int]:
    """Set a timeout; return those of all groups, that of the excluded group, and how many groups FSDP2 made."""
    mesh, checkpoints = build_mesh(layout, "cpu"), dist.new_group(timeout=timedelta(seconds=1800))
    before = len(torch_private.process_groups())
    if mesh.fsdp.size() == 4:  # resharding to two of four ranks takes groups of its own
        fully_shard(torch.nn.Linear(4, 4), mesh=mesh.fsdp, reshard_after_forward=2)
    groups = [group for group in torch_private.process_groups() if group is not checkpoints]
    assert isinstance(checkpoints, dist.ProcessGroup)
    set_collective_timeout(77, excluded=checkpoints)

    def timeout(group: Any) -> timedelta:
        return group._get_backend(torch.device("cpu")).options._timeout

    return {timeout(group) for group in groups}, timeout(checkpoints), len(groups) + 1 - before


def test_a_collective_timeout_reaches_every_group_but_the_excluded_one(pool):
    for layout in (Layout(dp_shard=4), Layout(dp_shard=2, tp=2), Layout(dp_shard=2, cp=2)):
        for changed, kept, of_fsdp in pool.run(timeouts, layout, world=4):
            assert changed == {timedelta(seconds=77)}
            assert kept == timedelta(seconds=1800)
            assert bool(of_fsdp) == (layout.dp_shard == 4)
