"""What a layout makes of a model, told without processes: groups of ranks, their nodes, every parameter's placement.

The real mesh and the real techniques are applied to the model on the meta device, in a world that only pretends to
exist: what is printed is what a run would have.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import cast

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from titanlite.config.job import Job
from titanlite.layout import DIMENSIONS
from titanlite.parallel.build import build_model
from titanlite.parallel.convert import build_converters
from titanlite.parallel.mesh import build_mesh
from titanlite.parallel.parallelize import apply_in_order


def describe(job: Job, per_node: int) -> str:
    """The realized mesh, and each parameter's placement on it."""
    # Private in torch 2.11 to 2.13 (tried on 2.13); the only group that needs no other process.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=job.layout.world)
    try:
        mesh = build_mesh(job.layout, "cpu")
        model, table = build_model(job)
        said: list[str] = []
        apply_in_order(model, job, mesh, table, build_converters(job), said.append)
        return "\n".join([*_groups(job, per_node), *said, "", *_parameters(model, job)])
    finally:
        dist.destroy_process_group()


def _groups(job: Job, per_node: int) -> list[str]:
    """For each dimension, the group of rank 0, and whether such groups cross nodes."""
    world = job.layout.world
    nodes = -(-world // per_node)
    lines = [f"mesh: {job.layout}" + (f", {world} ranks" if world > 1 else "")]
    lines.append(f"nodes: {nodes}, of {per_node} rank{'s' * (per_node > 1)} each (NGPU sets another number)")
    lines += [f"  node {node}: {_span(node, per_node, world)}" for node in range(min(nodes, 3))]
    if nodes > 3:
        lines.append(f"  … node {nodes - 1}: {_span(nodes - 1, per_node, world)}")
    for name, degree in zip(DIMENSIONS, job.layout.degrees, strict=True):
        if degree == 1:
            continue
        members: dict[tuple[int, ...], list[int]] = {}
        for rank in range(world):
            elsewhere = job.layout.coordinates(rank) | {name: 0}
            members.setdefault(tuple(elsewhere.values()), []).append(rank)
        across = max(len({rank // per_node for rank in group}) for group in members.values())
        where = "inside a node" if across == 1 else f"across {across} nodes"
        lines.append(f"{name} {degree}: {where}, e.g. ranks {_listed(next(iter(members.values())))}")
    return lines


def _span(node: int, per_node: int, world: int) -> str:
    first, last = node * per_node, min(world, (node + 1) * per_node) - 1
    return f"rank {first}" if first == last else f"ranks {first}-{last}"


def _listed(ranks: list[int]) -> str:
    shown = [str(rank) for rank in ranks]
    return ", ".join(shown if len(shown) <= 8 else [*shown[:4], "…", shown[-1]])


def _parameters(model: nn.Module, job: Job) -> list[str]:
    """A row for each parameter; layers that are placed alike share one."""
    rows: dict[tuple[str, ...], int] = {}
    for name, parameter in model.named_parameters():
        pattern = re.sub(rf"^({re.escape(job.spec.blocks)})\.\d+\.", r"\1.*.", name)
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        row = (pattern, _size(parameter.shape), _placement(parameter), _size(local.shape))
        rows[row] = rows.get(row, 0) + 1
    header = ("parameter", "shape", "placement", "on rank 0")
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for row, count in {header: 1, **rows}.items():
        cells = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append(f"{cells}  x {count}" if count > 1 else cells.rstrip())
    return lines


def _size(shape: Iterable[int]) -> str:
    return " x ".join(map(str, shape)) or "one number"


def _placement(parameter: nn.Parameter) -> str:
    """Which dimension of the tensor is split over which dimension of the mesh, in the order of the mesh."""
    if not isinstance(parameter, DTensor):
        return "whole on every rank"
    names = parameter.device_mesh.mesh_dim_names or ()
    split = [  # a strided shard is no Shard in every version, and has a dim all the same
        f"whole over {name}" if placement.is_replicate() else f"dim {cast(Shard, placement).dim} over {name}"
        for name, placement in zip(names, parameter.placements, strict=True)
    ]
    return ", ".join(split)
