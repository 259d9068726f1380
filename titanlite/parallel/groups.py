"""Process groups: splits of all ranks, shared by the views of them that need the same ones."""

import inspect
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


class Views:
    """Views of all ranks; those that need the same groups share them, on NCCL communicators."""

    def __init__(self, world: int, device_type: str) -> None:
        self._world = world
        self._device_type = device_type
        self._groups: dict[str, dist.ProcessGroup] = {}

    def mesh(self, dimensions: Sequence[str], degrees: Sequence[int], sharding: str) -> DeviceMesh:
        """Return a mesh with the dimensions of more than one rank, and the one that shards.

        FSDP2 needs its dimension also where it has one rank.
        """
        by_name = dict(zip(dimensions, degrees, strict=True))
        names = [name for name, degree in by_name.items() if degree > 1 or name == sharding]
        ranks = torch.arange(self._world, device="cpu").view([by_name[name] for name in names])
        groups = []
        for place, name in enumerate(names):
            groups.append(self.group(name, ranks.movedim(place, -1).reshape(-1, by_name[name])))
        return DeviceMesh.from_group(groups, self._device_type, ranks, mesh_dim_names=(*names,))

    def group(self, name: str, rows: Tensor) -> dist.ProcessGroup:
        """Return the group of this rank's row."""
        if len(rows) == 1:
            assert dist.group.WORLD
            return dist.group.WORLD
        key = str(sorted(rows.tolist()))
        if key not in self._groups:
            self._groups[key] = split(name, rows, gpu_only=name == "loss")
        return self._groups[key]


def part(mesh: DeviceMesh, *dimensions: str) -> DeviceMesh | None:
    """Return the part of a mesh with those of these dimensions that it has; None without any."""
    names = tuple(name for name in dimensions if name in (mesh.mesh_dim_names or ()))
    return mesh[names] if names else None


def split(name: str, rows: Tensor, gpu_only: bool = False) -> dist.ProcessGroup:
    """Split all ranks, which call this together, into a new group a row; return this rank's.

    With `gpu_only` no tensor on a CPU uses the groups: on NCCL they get no gloo.
    """
    lists_of_ranks = rows.tolist()
    assert dist.group.WORLD
    if not dist.group.WORLD.bound_device_id:
        group, _ = dist.new_subgroups_by_enumeration(lists_of_ranks, group_desc=name)
    else:  # by enumeration, each row would be a split of all ranks
        options: dict[str, Any] = {}
        if gpu_only and "backend" in inspect.signature(dist.split_group).parameters:  # torch 2.14
            options["backend"] = "cuda:nccl"
        group = dist.split_group(split_ranks=lists_of_ranks, group_desc=name, **options)
    return cast(dist.ProcessGroup, group)
