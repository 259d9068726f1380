"""One gradient norm over parameters on any mix of meshes; no wait for the device."""

from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from titanlite.parallel.dtensor import local_part

_ROW = 64  # elements of a gradient summed in float32
_LARGE = 1 << 17  # from this many elements on, norms of rows are faster than one norm in float64


def grad_norm(
    parameters: Iterable[torch.Tensor],
    p: float = 2.0,
    pp: DeviceMesh | None = None,
    copies: Collection[torch.Tensor] = (),
) -> torch.Tensor:
    """Return the p-norm of all gradients, equal on all ranks.

    `pp` is the mesh over pipeline stages, which have different parameters. `copies` are parameters
    that another stage counts.
    """
    # Tensors on different meshes can't be stacked, and torch converts placements one by one.
    alike: dict[object, list[torch.Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None and not any(parameter is copy for copy in copies):
            key = None
            if isinstance(gradient, DTensor):
                key = gradient.device_mesh, gradient.placements
            alike.setdefault(key, []).append(gradient)
    norms = [_norm(tensors, p) for tensors in alike.values()]
    device = pp.device_type if pp else None
    if norms:
        own = torch.linalg.vector_norm(torch.stack(norms), p)
    else:  # a stage may have no gradients
        own = torch.zeros((), dtype=torch.float64, device=device)
    if pp:
        return _over(own.double().to(device), p, pp.get_group()).to(own)
    return own


def clip_divisor(norm: torch.Tensor, max_norm: float) -> torch.Tensor | None:
    """Return what gradients are divided by for a norm of at most `max_norm`; None for nothing."""
    if max_norm == float("inf"):
        return None
    return ((norm + 1e-6) / max_norm).clamp(min=1.0)


def _over(norm: torch.Tensor, p: float, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the norm of all norms in the group."""
    if p == float("inf"):
        dist.all_reduce(norm, dist.ReduceOp.MAX, group)
        return norm
    powers = norm**p
    dist.all_reduce(powers, group=group)
    return powers ** (1 / p)


def _norm(gradients: list[torch.Tensor], p: float) -> torch.Tensor:
    """Return the norm of gradients with the same mesh and placements, on all of its ranks."""
    first = gradients[0]
    parts = [local_part(gradient) for gradient in gradients]
    if p == float("inf"):
        maxima = [parts[0].new_zeros(())]  # all shards may be empty, and torch refuses those
        maxima += [part.abs().max() for part in parts if part.numel()]
        norm = torch.stack(maxima).max()
    elif first.device.type != "cpu" and first.dtype != torch.bfloat16:
        norm = get_total_norm(parts, p)
    else:
        norm = torch.linalg.vector_norm(torch.stack([_exact_norm(part, p) for part in parts]), p)
    if isinstance(first, DTensor):
        for dimension, placement in enumerate(first.placements):
            if not placement.is_replicate():
                norm = _over(norm, p, first.device_mesh.get_group(dimension))
    return norm


def _exact_norm(part: torch.Tensor, p: float) -> torch.Tensor:
    """Return the norm of a plain tensor, in a type that holds the sum of its powers.

    A sum in bfloat16 would have three digits; so would a sum of 2**24 powers in float32 on a CPU,
    which adds them one by one. A sum in float64 takes ten times as long; norms of rows in float32,
    summed in float64, are fast and exact to 1e-8.
    """
    if part.device.type != "cpu":
        return torch.linalg.vector_norm(part, p, dtype=torch.float32)
    is_large = part.numel() >= _LARGE and part.dtype != torch.float64
    if is_large and part.is_contiguous() and part.numel() % _ROW == 0:
        part = torch.linalg.vector_norm(part.view(-1, _ROW), p, dim=1, dtype=torch.float32)
    return torch.linalg.vector_norm(part, p, dtype=torch.float64)
