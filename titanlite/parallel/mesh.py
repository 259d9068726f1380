"""The device mesh of a Layout, and the sub-meshes that the rest asks for by purpose."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

# Private in torch 2.11 to 2.13 (tried on 2.13); the public API tells a shard's shape, not where it lies.
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from titanlite.layout import DIMENSIONS, Layout
from titanlite.registry import Box


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


def build_mesh(layout: Layout, device_type: str) -> Mesh:
    # It warns of every gradient and norm that two dimensions split, where nothing can be done.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    world = init_device_mesh(device_type, layout.degrees, mesh_dim_names=DIMENSIONS)
    # _flatten is private in torch 2.11 to 2.13, and the only way to one group over several dimensions (tried on 2.13)
    loss = world["dp_replicate", "dp_shard", "cp"]._flatten("loss")
    fsdp = world["dp_replicate", "dp_shard"] if layout.dp_replicate > 1 else world["dp_shard"]
    return Mesh(world, fsdp, world["tp"], loss.get_group())


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, as plain values in the same memory."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    # torchao's class around a weight that is gathered in float8 keeps it there (private; tried on torchao 0.18).
    return getattr(local, "_tensor", local)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, in the same memory; a DTensor's local part has no class of its own."""
    local = local_part(tensor)
    if not isinstance(tensor, DTensor):
        return local
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def shard_offset(tensor: DTensor) -> tuple[int, ...]:
    """Where this rank's part begins in the full tensor."""
    place = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(place[1])


def box_of(tensor: torch.Tensor) -> Box:
    """Where this rank's part lies in the full tensor."""
    offset = shard_offset(tensor) if isinstance(tensor, DTensor) else (0,) * tensor.dim()
    return tuple(slice(start, start + size) for start, size in zip(offset, local_part(tensor).shape, strict=True))
