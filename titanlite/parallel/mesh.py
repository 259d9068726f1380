"""The device mesh of a Layout, and the sub-meshes that the rest asks for by purpose."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titanlite.layout import DIMENSIONS, Layout


@dataclass(frozen=True)
class Mesh:
    """The mesh with all dimensions, and its views by purpose."""

    world: DeviceMesh
    fsdp: DeviceMesh
    """Who shards parameters; under HSDP with the replicas as the outer dimension."""
    tp: DeviceMesh
    """Who splits matrices and sequences."""
    loss: dist.ProcessGroup
    """Who sums the loss and the valid tokens."""

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """All process groups of these views."""
        views = (self.world, self.fsdp, self.tp)
        return [*(group for view in views for group in view.get_all_groups()), self.loss]


def build_mesh(layout: Layout, device_type: str) -> Mesh:
    # It warns of every gradient and norm that two dimensions split, where nothing can be done.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    world = init_device_mesh(device_type, layout.degrees, mesh_dim_names=DIMENSIONS)
    # _flatten is private in torch 2.11 to 2.13, and the only way to one group over several dimensions (tried on 2.13)
    loss = world["dp_replicate", "dp_shard", "cp"]._flatten("loss")
    fsdp = world["dp_replicate", "dp_shard"] if layout.dp_replicate > 1 else world["dp_shard"]
    return Mesh(world, fsdp, world["tp"], loss.get_group())
