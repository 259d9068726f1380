"""The device mesh of a Layout, and its sub-meshes by purpose."""

import logging
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titanlite.layout import DIMENSIONS, EXPERT_DIMENSIONS, Layout


@dataclass(frozen=True)
class Mesh:
    """The mesh of all ranks, and its views by purpose."""

    world: DeviceMesh
    """All ranks, with every dimension of a Layout: `world["cp"]`."""
    fsdp: DeviceMesh
    """Ranks that shard parameters, dp_shard x cp; under HSDP the replicas come first."""
    tp: DeviceMesh
    """Ranks that split matrices and sequences; from the same root as `fsdp`, as FSDP2 requires."""
    data: dist.ProcessGroup
    """Ranks with the same parameters that see other tokens: those with the same
    coordinates of pp and tp."""
    loss: dist.ProcessGroup
    """Ranks with the same coordinate of tp: they sum the loss for the log and in a validation.

    (A step's valid tokens are summed over all ranks, by `guard.exchange`.)
    """
    stage: dist.ProcessGroup
    """Ranks with the same coordinate of pp, and so the same stages."""
    experts: DeviceMesh | None = None
    """Ranks that shard an expert's weights, with the replicas first; None if `fsdp` does so."""
    ep: DeviceMesh | None = None
    """Ranks that have different experts; from the same root as `experts`."""


def build_mesh(layout: Layout, device_type: str) -> Mesh:
    """Create the process groups of a layout."""
    # DTensor warns of every gradient and norm that two dimensions split, as they do here.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    world = init_device_mesh(device_type, layout.degrees, mesh_dim_names=DIMENSIONS)
    sharding = world
    shard = "dp_shard"
    if layout.cp > 1:  # a second view of the same ranks: dp_shard x cp is one dimension
        shard = "dp_shard_cp"
        degrees = (layout.pp, layout.dp_replicate, layout.fsdp, layout.tp)
        names = ("pp", "dp_replicate", shard, "tp")
        sharding = init_device_mesh(device_type, degrees, mesh_dim_names=names)
    fsdp = sharding["dp_replicate", shard] if layout.dp_replicate > 1 else sharding[shard]
    # world.mesh has the dimensions pp, three that read or split data, and tp. Each group has a list
    # of ranks: data for each (pp, tp), loss for each tp, stage for each pp.
    data = _group("data", world.mesh.movedim(-1, 1).flatten(2).flatten(0, 1).tolist())
    loss = data
    if layout.pp > 1:
        loss = _group("loss", world.mesh.movedim(-1, 0).flatten(1).tolist())
    stage = _group("stage", world.mesh.flatten(1).tolist())
    whole = Mesh(world, fsdp, sharding["tp"], data, loss, stage)
    if not layout.experts_on_own_mesh:
        return whole
    # A third view of the same ranks: those of ep follow each other.
    degrees = layout.expert_degrees
    root = init_device_mesh(device_type, degrees, mesh_dim_names=EXPERT_DIMENSIONS)
    experts = root["dp_replicate", "efsdp"] if layout.dp_replicate > 1 else root["efsdp"]
    return replace(whole, experts=experts, ep=root["ep"])


def _group(name: str, lists_of_ranks: list[list[int]]) -> dist.ProcessGroup:
    """Return the group of this rank's list; one list has all ranks."""
    if len(lists_of_ranks) == 1:  # all ranks need no second group, on NCCL no second communicator
        return dist.group.WORLD  # type: ignore[return-value]
    return dist.new_subgroups_by_enumeration(lists_of_ranks, group_desc=name)[0]  # type: ignore
