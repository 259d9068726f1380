"""Views of a tensor that may be a DTensor: this rank's part, and where it lies in the full tensor."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

# Private in torch 2.11 to 2.13 (tried on 2.13); the public API tells a shard's shape, not where it lies.
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from titanlite.registry import Box


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
