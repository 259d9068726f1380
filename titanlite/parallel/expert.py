"""Expert parallel: a rank has some experts of every block, and each token goes to the ranks that have its experts.

These ranks are some of those that share data, sequences or matrices: each has tokens of its own, under tensor
parallel a slice of every sequence. Dimension 0 of the experts' weights is split over them. FSDP2 shards what a rank
then has over all ranks with the same experts, and sums its gradients there; tensor parallel never splits an expert.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

from titanlite.models.common.moe import GatherRows, inverse
from titanlite.parallel.build import Context, named_parameters
from titanlite.parallel.dtensor import local_part
from titanlite.parallel.param_view import forward_with_converted_params
from titanlite.registry import Rule
from titanlite.runtime.torch_private import is_recomputing


def apply(model: nn.Module, context: Context) -> list[str]:
    """Split the experts' weights, and tell the routers of the global batch and of other ranks."""
    job, mesh, world = context.job, context.mesh.ep, context.mesh.world
    sharing = [world[name].get_group() for name in ("cp", "tp") if world[name].size() > 1]
    for router in routers(model).values():
        router.sequences, router.forced = job.batch.total, job.config.debug.moe_force_load_balance
        router.sum_over_sequence, router.runs_again = partial(_summed, sharing), is_recomputing
    if mesh is None or mesh.size() == 1:
        return []
    for module in expert_modules(model, context.table).values():
        own = dict(module.named_parameters(recurse=False))
        for name, weight in own.items():
            split = distribute_tensor(weight.detach(), mesh, (Shard(0),))
            module.register_parameter(name, nn.Parameter(split, requires_grad=weight.requires_grad))
        forward_with_converted_params(local_part, module, own)
    experts = job.shape.experts
    return [f"Applied expert parallel on {mesh.size()} ranks, {experts // mesh.size()} of {experts} experts each"]


def exchange(model: nn.Module, context: Context) -> list[str]:
    """Let experts compute the tokens of all ranks that have others."""
    mesh = context.mesh.ep
    if mesh is not None and mesh.size() > 1:
        for module in expert_modules(model, context.table).values():
            forward = partial(_exchanged, mesh.get_group(), module.forward)
            module.forward = forward  # type: ignore[method-assign]
    return []


def expert_modules(model: nn.Module, table: Mapping[str, Rule]) -> dict[str, nn.Module]:
    """Return the modules of a part that have experts' weights, by name."""
    names = [name for name, _ in named_parameters(model, table) if table[name].tensor == "expert"]
    return {path: model.get_submodule(path) for path in dict.fromkeys(name.rpartition(".")[0] for name in names)}


def routers(*parts: nn.Module) -> dict[str, Any]:
    """Return the modules that choose experts, by name."""
    return {name: module for part in parts for name, module in part.named_modules() if is_router(module)}


def is_router(module: nn.Module) -> bool:
    return hasattr(module, "sum_over_sequence")


def units(block: nn.Module, experts: Collection[nn.Module]) -> list[nn.Module]:
    """Return a block, or if it has experts its largest modules without: what is one graph.

    Experts exchange tokens and are gathered by themselves. Routers count, which must not be repeated.
    """
    if not any(module in experts for module in block.modules()):
        return [block]
    children = [child for child in block.children() if child not in experts and not is_router(child)]
    return [unit for child in children for unit in units(child, experts)]


def _summed(groups: Sequence[dist.ProcessGroup], counts: Tensor) -> Tensor:
    """Return counts of choices, summed over the ranks that share sequences."""
    total = counts.clone()
    for group in groups:
        dist.all_reduce(total, group=group)
    return total


def _exchanged(
    group: dist.ProcessGroup, compute: Callable[[Tensor, Tensor], Tensor], tokens: Tensor, counts: Tensor
) -> Tensor:
    """Send tokens, which are in the order of their experts, to the ranks of these; return what experts make of them.

    `counts` are those of all experts, and each rank has as many, in the order of the ranks.
    """
    received = _sent(group, counts)
    sizes = torch.stack([counts, received]).unflatten(1, (group.size(), -1)).sum(-1)
    send, receive = sizes.tolist()  # the only wait for the device: collectives take numbers of the host
    arrived = _Exchange.apply(tokens, group, send, receive)
    # From the order (rank, expert) to the order (expert, rank).
    own = torch.arange(counts.numel() // group.size(), device=counts.device).repeat(group.size())
    order = own.repeat_interleave(received, output_size=sum(receive)).argsort(stable=True)
    place = inverse(order)
    outputs = compute(GatherRows.apply(arrived, order, place), received.unflatten(0, (group.size(), -1)).sum(0))
    return _Exchange.apply(GatherRows.apply(outputs, place, order), group, receive, send)  # type: ignore[return-value]


def _sent(
    group: dist.ProcessGroup, rows: Tensor, send: list[int] | None = None, receive: list[int] | None = None
) -> Tensor:
    """Send rows to the ranks of a group, the same number to each without `send`; return those that arrive."""
    arrived = rows.new_empty(sum(receive) if receive else len(rows), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), receive, send, group=group)
    return arrived


class _Exchange(torch.autograd.Function):
    """Send rows to other ranks; the backward pass returns their gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup, send: list[int], receive: list[int]) -> Tensor:
        ctx.back = group, receive, send
        return _sent(group, rows, send, receive)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        group, send, receive = ctx.back
        return _sent(group, gradient, send, receive), None, None, None
