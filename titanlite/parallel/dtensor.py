"""Views of a tensor that may be a DTensor: this rank's shard, and its place in the full tensor."""

import torch
from torch.distributed.tensor import DTensor

from titanlite.registry import Box
from titanlite.runtime import torch_private


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard as a plain tensor in the same memory."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return torch_private.unwrap_float8_weight(tensor)


def let_go(tensor: torch.Tensor) -> None:
    """Free the memory of a tensor that maps a file (optim/state_store.py)."""
    if hasattr(tensor, "let_go"):
        tensor.let_go()


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same tensor in the same memory; a DTensor's shard becomes a plain tensor."""
    return with_shard(tensor, local_part(tensor))


def with_shard(tensor: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    """Return a tensor placed on the mesh like the given one, whose shard is `shard`."""
    if isinstance(tensor, DTensor):
        return torch_private.dtensor_like(tensor, shard)
    return shard


def shard_offset(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the start of this rank's shard in the full tensor."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim()
    return torch_private.shard_offset(tensor)


def box_of(tensor: torch.Tensor) -> Box:
    """Return the region of the full tensor that this rank holds."""
    bounds = zip(shard_offset(tensor), local_part(tensor).shape, strict=True)
    return tuple(slice(start, start + size) for start, size in bounds)
