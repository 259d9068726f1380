"""One gradient norm over parameters on any mix of meshes, and clipping, without device waits."""

from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from titanlite.parallel.dtensor import local_part
from titanlite.runtime.torch_private import foreach_mul_


def clip_grad_norm(
    parameters: Iterable[torch.Tensor],
    max_norm: float,
    p: float = 2.0,
    stages: DeviceMesh | None = None,
    copies: Collection[torch.Tensor] = (),
) -> torch.Tensor:
    """Scale the gradients to a global p-norm of at most `max_norm`.

    Return the norm before, equal on all ranks. `stages` is the mesh of the pipeline stages, which
    have different parameters. `copies` are parameters that another stage counts: they are scaled,
    but not counted again.
    """
    gradients = {
        parameter: parameter.grad for parameter in parameters if parameter.grad is not None
    }
    # Tensors on different meshes cannot be stacked: each mesh has its own norm.
    by_mesh: dict[object, list[torch.Tensor]] = {}
    for parameter, gradient in gradients.items():
        if not any(parameter is copy for copy in copies):
            mesh = getattr(gradient, "device_mesh", None)
            by_mesh.setdefault(mesh, []).append(gradient)
    norms = [_norm(tensors, p) for tensors in by_mesh.values()]
    # A stage may have no gradients, and then no type for their norm.
    device = stages.device_type if stages else None
    zero = torch.zeros((), dtype=torch.float64, device=device)
    own = torch.linalg.vector_norm(torch.stack(norms), p) if norms else zero
    total = own
    if stages:
        total = _over_stages(own.double().to(device), p, stages.get_group()).to(own)
    if max_norm == float("inf"):
        return total
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    if gradients:
        # On local parts: for a list of DTensors on a mesh of three dimensions torch spends many
        # seconds on finding how the result is sharded.
        foreach_mul_([local_part(gradient) for gradient in gradients.values()], scale)
    return total


def _over_stages(norm: torch.Tensor, p: float, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the norm of all stages' norms."""
    if p == float("inf"):
        dist.all_reduce(norm, dist.ReduceOp.MAX, group)
        return norm
    powers = norm**p
    dist.all_reduce(powers, group=group)
    return powers ** (1 / p)


def _norm(gradients: list[torch.Tensor], p: float) -> torch.Tensor:
    if p == float("inf"):
        return _max_abs(gradients)
    # In bfloat16 sums would have three digits. A CPU adds one square after the other: in float32,
    # 2**24 of them have three digits too.
    wide = torch.float32 if gradients[0].dtype == torch.bfloat16 else None
    if gradients[0].device.type == "cpu":
        wide = torch.float64
    if wide:  # of DTensors partial norms, which get_total_norm would all-reduce one by one
        norms: dict[
            object, list[torch.Tensor]
        ] = {}  # by placements: torch converts those that differ one by one
        for gradient in gradients:
            same = norms.setdefault(getattr(gradient, "placements", None), [])
            same.append(torch.linalg.vector_norm(gradient, p, dtype=wide))
        norm = torch.linalg.vector_norm(
            torch.cat([torch.stack(same) for same in norms.values()]), p
        )
    else:
        norm = get_total_norm(gradients, p)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _max_abs(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return the largest absolute value; torch refuses an empty shard, and all may be empty."""
    parts = [local_part(gradient) for gradient in gradients]
    maxima = [part.abs().max() for part in parts if part.numel()]
    largest = torch.stack(maxima).max() if maxima else parts[0].new_zeros(())
    first = gradients[0]
    if isinstance(first, DTensor):
        for dimension in range(first.device_mesh.ndim):
            group = first.device_mesh.get_group(dimension)
            dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    return largest
