"""How the ranks of a group agree on which parts of tensors each of them holds."""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from titanlite.checkpoint.stored_tensors import TYPES, Split, StoredTensor, spread
from titanlite.errors import UserError
from titanlite.runtime.distributed import gather_objects, rank_in

REPLICATE = "dp_replicate"
"""The dimension along which all tensors are equal, whether or not their meshes have it."""


def describe_all(
    tensors: Mapping[str, torch.Tensor], rank: int, replicas: tuple[int, int]
) -> dict[str, StoredTensor]:
    """Describe this rank's tensors; `replicas` are their number, and the ranks from one to the
    next.
    """
    layouts: dict[Any, Split] = {}
    described = {}
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in TYPES:
            raise UserError(f"{name} is of the type {dtype}, which checkpoints do not hold")
        key = None
        if isinstance(tensor, DTensor):
            key = tensor.device_mesh, tensor.placements
        layout = layouts.get(key)
        if layout is None:
            layout = layouts[key] = _over_replicas(layout_of(tensor), rank, *replicas)
        described[name] = StoredTensor(tuple(tensor.shape), dtype, layout)
    return described


def layout_of(tensor: torch.Tensor) -> Split:
    """Return how a tensor is split over a mesh; an unsplit one has a mesh of one rank."""
    if not isinstance(tensor, DTensor):
        return Split()
    splits = list[tuple[Any, int]]()
    late = list[tuple[Any, int]]()
    for axis, placement in enumerate(tensor.placements):
        dim = getattr(placement, "dim", None)  # every kind of shard has one
        # A strided shard, of FSDP, splits what tensor parallel, to its right, has split already.
        if hasattr(placement, "split_factor"):
            late.insert(0, (dim, axis))
        elif dim is not None:
            splits.append((dim, axis))
    ranks = tensor.device_mesh.mesh
    strides = []
    for axis, size in enumerate(ranks.shape):
        line = ranks.movedim(axis, -1).reshape(-1, size)[0].tolist()
        stride = line[1] - line[0] if size > 1 else 1
        strides.append(stride)
    names = tuple(tensor.device_mesh.mesh_dim_names or ())
    first = int(ranks.min())
    return Split(names, tuple(ranks.shape), tuple(strides), first, (*splits, *late))


def _over_replicas(layout: Split, rank: int, replicas: int, stride: int) -> Split:
    """Return a layout that has the copies of all replicas."""
    if replicas == 1 or REPLICATE in layout.names:
        return layout
    first = layout.first
    if layout.names:
        first -= rank // stride % replicas * stride
    splits = tuple((dim, axis + 1) for dim, axis in layout.splits)
    names = (REPLICATE, *layout.names)
    return Split(names, (replicas, *layout.sizes), (stride, *layout.strides), first, splits)


def agree(own: dict[str, StoredTensor], group: dist.ProcessGroup | None) -> dict[str, StoredTensor]:
    """Return the tensors of all ranks, each described by its lowest rank, with the writing shared
    out over copies.

    Ranks with equal descriptions, such as those of a stage, send them only once.
    """
    digest = hashlib.sha256(repr(own).encode()).digest()
    if gather_objects(digest, group).index(digest) != rank_in(group):
        own = {}
    tables = gather_objects(own, group, only_rank_0=True)
    merged: dict[str, StoredTensor] = {}
    if rank_in(group) == 0:
        for rank, table in enumerate(tables):
            for name, tensor in table.items():
                if not {*tensor.layout.names} - {REPLICATE}:  # its lowest rank was not known
                    tensor = replace(tensor, layout=replace(tensor.layout, first=rank))
                merged.setdefault(name, tensor)
        merged = spread(merged)
    if group:
        shared = [merged]
        dist.broadcast_object_list(shared, src=0, group=group)
        merged = shared[0]
    return merged
