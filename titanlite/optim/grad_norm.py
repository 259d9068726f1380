"""One gradient norm over parameters on any mix of meshes, and clipping by it; no host synchronization."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from titanlite.parallel.dtensor import local_part


def clip_grad_norm(parameters: Iterable[torch.Tensor], max_norm: float, p: float = 2.0) -> torch.Tensor:
    """Scale gradients down to a global norm of at most `max_norm`; return the norm they had, equal on all ranks.

    Tensors on different meshes can't be stacked, so each mesh has its own norm, and those are combined. Every rank
    scales its own parts: for a list of DTensors on a mesh of three dimensions torch searches many seconds for how the
    result is split.
    """
    by_mesh: dict[object, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_mesh.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter.grad)
    total = torch.linalg.vector_norm(torch.stack([_norm(gradients, p) for gradients in by_mesh.values()]), p)
    if max_norm != float("inf"):
        scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
        parts = [local_part(gradient) for gradients in by_mesh.values() for gradient in gradients]
        torch._foreach_mul_(parts, scale)  # all in one kernel, as torch's own clipping does (tried on 2.11 and 2.13)
    return total


def _norm(gradients: list[torch.Tensor], p: float) -> torch.Tensor:
    if p == float("inf"):
        return _largest(gradients)
    if gradients[0].dtype == torch.bfloat16:  # its own sums would have three digits
        gradients = [torch.linalg.vector_norm(gradient, p, dtype=torch.float32) for gradient in gradients]
    norm = get_total_norm(gradients, p)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _largest(gradients: list[torch.Tensor]) -> torch.Tensor:
    """The largest absolute value. torch has none of a shard without elements, and a rank may hold only such."""
    first, parts = gradients[0], [local_part(gradient) for gradient in gradients]
    held = [part.abs().max() for part in parts if part.numel()]
    largest = torch.stack(held).max() if held else parts[0].new_zeros(())
    if isinstance(first, DTensor):
        for dimension in range(first.device_mesh.ndim):
            dist.all_reduce(largest, dist.ReduceOp.MAX, first.device_mesh.get_group(dimension))
    return largest
