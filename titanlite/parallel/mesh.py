"""The device mesh of a Layout, and its sub-meshes by purpose."""

import logging
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from titanlite.layout import DIMENSIONS, EXPERT_DIMENSIONS, Layout
from titanlite.parallel.groups import Views, part


@dataclass(frozen=True)
class Mesh:
    """The mesh of all ranks, and its views by purpose."""

    world: DeviceMesh
    """All ranks, with each dimension of a Layout that has more than one rank: `world["cp"]`."""
    fsdp: DeviceMesh
    """Ranks that shard parameters, dp_shard x cp; under HSDP the replicas come first."""
    pp: DeviceMesh | None
    """Ranks that have the stages of a pipeline together."""
    tp: DeviceMesh | None
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
    views = Views(layout.world, device_type)
    # The dimensions are pp, three that read or split data, and tp. Each group has a row of ranks:
    # data for each (pp, tp), loss for each tp, stage for each pp.
    ranks = torch.arange(layout.world, device="cpu").view(layout.degrees)
    stage = views.group("stage", ranks.flatten(1))
    shard = "dp_shard"
    world = views.mesh(DIMENSIONS, layout.degrees, shard if layout.cp == 1 else "")
    sharding = world
    if layout.cp > 1:  # a second view of the same ranks: dp_shard x cp is one dimension
        shard = "dp_shard_cp"
        degrees = (layout.pp, layout.dp_replicate, layout.fsdp, layout.tp)
        sharding = views.mesh(("pp", "dp_replicate", shard, "tp"), degrees, shard)
    fsdp = part(sharding, "dp_replicate", shard)
    assert fsdp
    data = views.group("data", ranks.movedim(-1, 1).flatten(2).flatten(0, 1))
    loss = data
    if layout.pp > 1:
        loss = views.group("loss", ranks.movedim(-1, 0).flatten(1))
    whole = Mesh(world, fsdp, part(world, "pp"), part(sharding, "tp"), data, loss, stage)
    if not layout.experts_on_own_mesh:
        return whole
    # A third view of the same ranks: those of ep follow each other.
    root = views.mesh(EXPERT_DIMENSIONS, layout.expert_degrees, "efsdp")
    experts = part(root, "dp_replicate", "efsdp")
    return replace(whole, experts=experts, ep=part(root, "ep"))
