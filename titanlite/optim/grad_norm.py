"""One gradient norm over parameters on any mix of meshes, and clipping by it, without waiting for the device."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from titanlite.parallel.dtensor import local_part
from titanlite.runtime.torch_private import foreach_mul_


def clip_grad_norm(parameters: Iterable[torch.Tensor], max_norm: float, p: float = 2.0) -> torch.Tensor:
    """Scale the gradients to a global p-norm of at most `max_norm`; return the norm before, equal on all ranks."""
    # Tensors on different meshes cannot be stacked: each mesh has its own norm, and these are combined.
    by_mesh: dict[object, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_mesh.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter.grad)
    total = torch.linalg.vector_norm(torch.stack([_norm(gradients, p) for gradients in by_mesh.values()]), p)
    if max_norm != float("inf"):
        scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
        # On local parts: for a list of DTensors on a mesh of three dimensions torch spends many seconds on finding
        # how the result is sharded.
        foreach_mul_([local_part(gradient) for gradients in by_mesh.values() for gradient in gradients], scale)
    return total


def _norm(gradients: list[torch.Tensor], p: float) -> torch.Tensor:
    if p == float("inf"):
        return _max_abs(gradients)
    if gradients[0].dtype == torch.bfloat16:  # sums in bfloat16 would have three digits
        gradients = [torch.linalg.vector_norm(gradient, p, dtype=torch.float32) for gradient in gradients]
    norm = get_total_norm(gradients, p)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _max_abs(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return the largest absolute value; torch cannot take that of an empty shard, and all may be empty."""
    first, parts = gradients[0], [local_part(gradient) for gradient in gradients]
    maxima = [part.abs().max() for part in parts if part.numel()]
    largest = torch.stack(maxima).max() if maxima else parts[0].new_zeros(())
    if isinstance(first, DTensor):
        for dimension in range(first.device_mesh.ndim):
            dist.all_reduce(largest, dist.ReduceOp.MAX, first.device_mesh.get_group(dimension))
    return largest
