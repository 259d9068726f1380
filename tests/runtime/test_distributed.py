"""Timeouts of collectives reach every group of a mesh."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from titanlite.layout import Layout
from titanlite.parallel.mesh import build_mesh
from titanlite.runtime.distributed import set_collective_timeout


def timeouts_of_all_groups(layout: Layout) -> tuple[set[timedelta], timedelta]:
    """Set a timeout; return those of all groups of the mesh, and that of a group that was not named."""
    mesh, checkpoints = build_mesh(layout, "cpu"), dist.new_group(timeout=timedelta(seconds=1800))
    set_collective_timeout(77, mesh.groups)
    views = [mesh.world, mesh.fsdp, mesh.tp]
    groups = [dist.group.WORLD, mesh.loss, *(group for view in views for group in view.get_all_groups())]

    def timeout(group: Any) -> timedelta:
        return group._get_backend(torch.device("cpu")).options._timeout

    return {timeout(group) for group in groups}, timeout(checkpoints)


def test_a_collective_timeout_reaches_every_group_of_the_mesh_but_no_other(pool):
    for layout in (Layout(dp_replicate=2, dp_shard=2), Layout(dp_shard=2, tp=2), Layout(dp_shard=2, cp=2)):
        for changed, kept in pool.run(timeouts_of_all_groups, layout, world=4):
            assert changed == {timedelta(seconds=77)}
            assert kept == timedelta(seconds=1800)
