"""One gradient norm over parameters on any mix of meshes, and clipping by it; no host synchronisation."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


def clip_grad_norm(parameters: Iterable[torch.Tensor], max_norm: float, p: float = 2.0) -> torch.Tensor:
    """Scale gradients down to a global norm of at most `max_norm`; return the norm they had, equal on all ranks.

    Tensors on different meshes can't be stacked, so each mesh has its own norm, and those are combined.
    """
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    by_mesh: dict[object, list[torch.Tensor]] = {}
    for parameter in parameters:
        assert parameter.grad is not None
        by_mesh.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter.grad)
    norms = [_full(get_total_norm(gradients, p)) for gradients in by_mesh.values()]
    total = torch.linalg.vector_norm(torch.stack(norms), p)
    if max_norm != float("inf"):
        clip_grads_with_norm_(parameters, max_norm, total)
    return total


def _full(norm: torch.Tensor) -> torch.Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
