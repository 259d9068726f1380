"""One gradient norm over parameters on any mix of meshes, and clipping by it; no host synchronisation."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


def clip_grad_norm(parameters: Iterable[torch.Tensor], max_norm: float, p: float = 2.0) -> torch.Tensor:
    """Scale gradients down to a global norm of at most `max_norm`; return the norm they had, equal on all ranks.

    Tensors on different meshes can't be stacked, so each mesh has its own norm, and those are combined; nor can one
    kernel scale them.
    """
    by_mesh: dict[object, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_mesh.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter)
    norms = [_norm([q.grad for q in group if q.grad is not None], p) for group in by_mesh.values()]
    total = torch.linalg.vector_norm(torch.stack(norms), p)
    if max_norm != float("inf"):
        for group in by_mesh.values():
            clip_grads_with_norm_(group, max_norm, total)
    return total


def _norm(gradients: list[torch.Tensor], p: float) -> torch.Tensor:
    if gradients[0].dtype == torch.bfloat16:  # its own sums would have three digits
        gradients = [torch.linalg.vector_norm(gradient, p, dtype=torch.float32) for gradient in gradients]
    norm = get_total_norm(gradients, p)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
