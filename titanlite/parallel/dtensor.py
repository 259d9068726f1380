"""Views of a tensor that may be a DTensor: this rank's shard, and where it lies in the full tensor."""

import torch
from torch.distributed.tensor import DTensor

from titanlite.registry import Box
from titanlite.runtime import torch_private


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard as a plain tensor in the same memory."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return torch_private.unwrap_float8_weight(local)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same tensor in the same memory, the shard of a DTensor being a plain tensor."""
    local = local_part(tensor)
    if not isinstance(tensor, DTensor):
        return local
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def shard_offset(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return where this rank's shard begins in the full tensor."""
    return torch_private.shard_offset(tensor) if isinstance(tensor, DTensor) else (0,) * tensor.dim()


def box_of(tensor: torch.Tensor) -> Box:
    """Return the region of the full tensor that this rank holds."""
    sizes = local_part(tensor).shape
    return tuple(slice(start, start + size) for start, size in zip(shard_offset(tensor), sizes, strict=True))


def describe_placement(tensor: torch.Tensor) -> str:
    """Say which dimension of the tensor is split over which dimension of the mesh, in the order of the mesh."""
    if not isinstance(tensor, DTensor):
        return "replicated"
    names = tensor.device_mesh.mesh_dim_names or ()
    dims = (getattr(placement, "dim", None) for placement in tensor.placements)  # whichever kind of shard it is
    splits = zip(names, dims, strict=True)
    return ", ".join(f"replicated over {name}" if dim is None else f"dim {dim} over {name}" for name, dim in splits)
