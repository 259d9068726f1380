"""The device mesh of a Layout, and its sub-meshes by purpose."""

import inspect
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from titanlite.config.layout import DIMENSIONS, EXPERT_DIMENSIONS, Layout


@dataclass(frozen=True)
class Mesh:
    """The mesh of all ranks, and its views by purpose."""

    layout: Layout
    world: DeviceMesh
    """All ranks, with every dimension of the Layout that has more than one: `world["cp"]`."""
    fsdp: DeviceMesh
    """Ranks that shard parameters, dp_shard x cp; under HSDP the replicas come first."""
    pp: DeviceMesh | None
    """Ranks that hold the stages of one pipeline."""
    tp: DeviceMesh | None
    """Ranks that split matrices and sequences; from the same root as `fsdp`, as FSDP2 requires."""
    data: dist.ProcessGroup
    """Ranks with the same parameters but different tokens: those with equal coordinates of pp and
    tp."""
    loss: dist.ProcessGroup
    """Ranks with the same coordinate of tp: they sum the loss for the log and for validation.

    (`guard.exchange` sums a step's valid tokens over all ranks.)
    """
    stage: dist.ProcessGroup
    """Ranks with the same coordinate of pp, and so the same stages."""
    experts: DeviceMesh | None = None
    """Ranks that shard an expert's weights, with the replicas first; None if `fsdp` does."""
    ep: DeviceMesh | None = None
    """Ranks with different experts; from the same root as `experts`."""

    def coordinates(self, dimensions: Sequence[str]) -> list[tuple[int, ...]]:
        """Return the coordinate of each rank of the stage on some dimensions of any view."""
        ranks = dist.get_process_group_ranks(self.stage)
        return [self.layout.place(rank, dimensions) for rank in ranks]


def build_mesh(layout: Layout, device_type: str) -> Mesh:
    """Create the process groups of a layout."""
    # DTensor warns about every gradient and norm that two dimensions split, as is intended here.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    views = Views(layout.world, device_type)
    # The dimensions are pp, three that read or split data, and tp. There is a data group for each
    # (pp, tp), a loss group for each tp, and a stage group for each pp.
    ranks = torch.arange(layout.world, device="cpu").view(layout.degrees)
    stage = views.group("stage", ranks.flatten(1))
    if layout.cp == 1:
        shard = "dp_shard"
        world = views.mesh(DIMENSIONS, layout.degrees, shard)
        sharding = world
    else:  # a second view of the same ranks: dp_shard x cp is one dimension
        shard = "dp_shard_cp"
        world = views.mesh(DIMENSIONS, layout.degrees, "")
        degrees = (layout.pp, layout.dp_replicate, layout.fsdp, layout.tp)
        sharding = views.mesh(("pp", "dp_replicate", shard, "tp"), degrees, shard)
    fsdp = submesh(sharding, "dp_replicate", shard)
    assert fsdp
    data = views.group("data", ranks.movedim(-1, 1).flatten(2).flatten(0, 1))
    loss = data
    if layout.pp > 1:
        loss = views.group("loss", ranks.movedim(-1, 0).flatten(1))
    pp = submesh(world, "pp")
    whole = Mesh(layout, world, fsdp, pp, submesh(sharding, "tp"), data, loss, stage)
    if not layout.experts_on_own_mesh:
        return whole
    # A third view of the same ranks, in which those of ep are neighbors.
    root = views.mesh(EXPERT_DIMENSIONS, layout.expert_degrees, "efsdp")
    experts = submesh(root, "dp_replicate", "efsdp")
    return replace(whole, experts=experts, ep=submesh(root, "ep"))


class Views:
    """Views of all ranks; views that need the same groups share them, and NCCL communicators."""

    def __init__(self, world: int, device_type: str) -> None:
        self._world = world
        self._device_type = device_type
        self._groups: dict[str, dist.ProcessGroup] = {}

    def mesh(self, dimensions: Sequence[str], degrees: Sequence[int], sharding: str) -> DeviceMesh:
        """Return a mesh with the dimensions of more than one rank, and the one that shards.

        FSDP2 needs its dimension even with one rank.
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
            self._groups[key] = new_groups(name, rows, gpu_only=name == "loss")
        return self._groups[key]


def submesh(mesh: DeviceMesh, *dimensions: str) -> DeviceMesh | None:
    """Return a mesh of those given dimensions that the mesh has; None if it has none of them."""
    names = tuple(name for name in dimensions if name in (mesh.mesh_dim_names or ()))
    if not names:
        return None
    return mesh[names]


def new_groups(name: str, rows: Tensor, gpu_only: bool = False) -> dist.ProcessGroup:
    """Split all ranks, which call this together, into one new group per row; return this rank's.

    With `gpu_only` no tensor on a CPU uses the groups, so that with NCCL they get no gloo.
    """
    lists_of_ranks = rows.tolist()
    assert dist.group.WORLD
    if not dist.group.WORLD.bound_device_id:
        group, _ = dist.new_subgroups_by_enumeration(lists_of_ranks, group_desc=name)
    else:  # by enumeration, each row would be a split of all ranks
        options: dict[str, Any] = {}
        # Until torch 2.14 is the minimum: earlier ones lack `backend`.
        if gpu_only and "backend" in inspect.signature(dist.split_group).parameters:
            options["backend"] = "cuda:nccl"
        group = dist.split_group(split_ranks=lists_of_ranks, group_desc=name, **options)
    return cast(dist.ProcessGroup, group)
