"""Expert parallel: a rank has some experts of every block; tokens are sent to their experts' ranks.

These ranks are also data, context or tensor parallel ranks, so each has different tokens; under
tensor parallel these are a slice of every sequence. Dimension 0 of the experts' weights is split
over them. FSDP2 shards a rank's experts over all ranks with the same experts, and sums their
gradients there; tensor parallel never splits an expert.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from titanlite.models.common.moe import GatherRows, Router, RouterContext, inverse
from titanlite.parallel.build import Context, named_parameters
from titanlite.parallel.collectives import AllToAll, send_rows
from titanlite.parallel.dtensor import local_part
from titanlite.parallel.param_view import split_parameters
from titanlite.registry import Rule
from titanlite.runtime.torch_private import is_recomputing

RowOrder = Callable[[Tensor, int], tuple[Tensor, Tensor, Tensor]]


def apply(model: nn.Module, context: Context) -> list[str]:
    """Split the experts' weights; give routers the global batch size and a sum over ranks."""
    job = context.job
    world = context.mesh.world
    shared = [name for name in ("cp", "tp") if getattr(job.layout, name) > 1]
    sharing = [world.get_group(name) for name in shared]
    router_context = RouterContext(
        sequences=job.batch.total,
        forced=job.config.debug.moe_force_load_balance,
        sum_over_sequence=partial(_summed, sharing),
        runs_again=is_recomputing,
    )
    for router in routers(model).values():
        router.context = router_context
    mesh = context.mesh.ep
    if mesh is None:
        return []
    for module in expert_modules(model, context.table).values():
        split_parameters(module, mesh, Shard(0), local_part)
    ranks = mesh.size()
    experts = job.shape.experts
    return [
        f"Applied expert parallel on {ranks} ranks, {experts // ranks} of {experts} experts each"
    ]


def dispatch(model: nn.Module, context: Context) -> list[str]:
    """Let each rank's experts compute the tokens that other ranks route to them."""
    mesh = context.mesh.ep
    if mesh is None:
        return []
    settings = context.job.config.compile
    row_order: RowOrder = order_by_expert
    if settings.enable and "model" in settings.components:
        row_order = torch.compile(row_order, fullgraph=True, dynamic=True, backend=settings.backend)
    for module in expert_modules(model, context.table).values():
        forward = partial(
            _dispatch, mesh.get_group(), module.forward, row_order, context.exchange_sizes
        )
        module.forward = forward  # type: ignore[method-assign]
    return []


def expert_modules(model: nn.Module, table: Mapping[str, Rule]) -> dict[str, nn.Module]:
    """Return the modules of a part that have experts' weights, by name."""
    modules: dict[str, nn.Module] = {}
    for name, _ in named_parameters(model, table):
        if table[name].tensor == "expert":
            path = name.rpartition(".")[0]
            modules[path] = model.get_submodule(path)
    return modules


def routers(*parts: nn.Module) -> dict[str, Router]:
    """Return the modules that choose experts, by name."""
    found: dict[str, Router] = {}
    for part in parts:
        for name, module in part.named_modules():
            if isinstance(module, Router):
                found[name] = module
    return found


def units(block: nn.Module, experts: Collection[nn.Module]) -> list[nn.Module]:
    """Return the parts of a block that become one graph each.

    That is the whole block, or in a block with experts its largest modules without experts and
    routers: experts exchange tokens and are gathered separately, and a router's counting must not
    be repeated.
    """
    if not any(module in experts for module in block.modules()):
        return [block]
    found = []
    for child in block.children():
        if child not in experts and not isinstance(child, Router):
            found += units(child, experts)
    return found


def _summed(groups: Sequence[dist.ProcessGroup], counts: Tensor) -> Tensor:
    """Return counts of choices, summed over the ranks that share sequences."""
    if not groups:
        return counts
    total = counts.clone()
    for group in groups:
        dist.all_reduce(total, group=group)
    return total


def _dispatch(
    group: dist.ProcessGroup,
    compute: Callable[[Tensor, Tensor], Tensor],
    row_order: RowOrder,
    exchange_sizes: Callable[[Tensor, int], list[list[int]]],
    tokens: Tensor,
    counts: Tensor,
) -> Tensor:
    """Send tokens, which are in the order of their experts, to these experts' ranks, and return the
    outputs.

    `counts` has the number of tokens for every expert, in the order of the ranks; each rank has
    equally many experts.
    """
    ranks = group.size()
    received = send_rows(counts, group)
    sizes = torch.stack([counts, received]).unflatten(1, (ranks, -1)).sum(-1)
    send, receive = exchange_sizes(sizes, len(tokens))
    arrived = AllToAll.apply(tokens, group, send, receive)
    received = received.unflatten(0, (ranks, -1))
    order, position, own_counts = row_order(received, sum(receive))
    outputs = compute(GatherRows.apply(arrived, order, position), own_counts)
    by_rank = GatherRows.apply(outputs, position, order)
    return AllToAll.apply(by_rank, group, receive, send)  # type: ignore[return-value]


def order_by_expert(received: Tensor, total: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the order that sorts arriving rows by expert, its inverse, and the rows of each
    expert.

    Rows arrive by rank, and within a rank by expert. `received` has their numbers (ranks, experts),
    `total` is the sum. Positions are counted, since a sort reads all rows several times.
    """
    sizes = received.t().flatten()  # of the blocks by expert
    starts = (sizes.cumsum(0) - sizes).unflatten(0, (-1, len(received))).t().flatten()
    ends = received.flatten().cumsum(0)
    shifts = starts + received.flatten() - ends
    rows = torch.arange(total, device=ends.device)
    position = rows + shifts[torch.searchsorted(ends, rows, right=True)]
    return inverse(position), position, received.sum(0)
