"""Context parallel: each rank has some tokens of every sequence, and attention sees the others' keys and values.

Only attention's core mixes tokens, so only it communicates: "allgather" gathers keys and values, and attends from a
rank's own tokens; "ulysses" exchanges tokens for heads, and attends from all tokens for some of the heads. Whatever
else a model computes, it computes for each token by itself, at the position that it is given.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from titanlite.config.job import Job
from titanlite.errors import UserError
from titanlite.parallel.build import Context
from titanlite.runtime.torch_private import attend_last

HEADS, TOKENS = 1, 2  # dimensions of queries, keys and values


def places(tokens: int, degree: int, rank: int, balanced: bool) -> list[range]:
    """Return a rank's chunks of a sequence: one, or balanced one from its head and one from its tail.

    Together these see (2 x degree + 1) x chunk^2 pairs of tokens on every rank, counting the last chunk seen whole.
    """
    chunk = tokens // degree // (1 + balanced)
    numbers = (rank, 2 * degree - 1 - rank) if balanced else (rank,)
    return [range(number * chunk, (number + 1) * chunk) for number in numbers]


def own_places(job: Job, rank: int, device: torch.device, tokens: int) -> Tensor | None:
    """Return the places in a sequence of the tokens that a rank has; None if all, and no later stage must be told."""
    if job.layout.cp == job.layout.pp == 1:
        return None
    chunks = places(tokens, job.layout.cp, job.layout.coordinates(rank)["cp"], is_balanced(job))
    return torch.cat([torch.arange(chunk.start, chunk.stop, device=device) for chunk in chunks])


def sequence_multiple(job: Job) -> int:
    """Return of what a sequence's length must be a multiple."""
    return job.layout.cp * job.layout.tp * (1 + is_balanced(job))


def is_balanced(job: Job) -> bool:
    """Whether ranks have chunks from head and tail; those that exchange heads have equal work without."""
    settings = job.config.parallelism
    gathers = job.layout.cp > 1 and settings.context_parallel_rotate_method == "allgather"
    return gathers and settings.context_parallel_load_balancer == "headtail"


def apply(model: nn.Module, context: Context) -> list[str]:
    """Let the core of every block's attention see the tokens of all ranks."""
    job, mesh, spec = context.job, context.mesh.world["cp"], context.job.spec
    if mesh.size() == 1:
        return []
    gathers, balanced = job.config.parallelism.context_parallel_rotate_method == "allgather", is_balanced(job)
    own_chunks = partial(places, degree=mesh.size(), rank=mesh.get_local_rank(), balanced=balanced)
    attend = partial(_gathered, mesh, own_chunks) if gathers else partial(_exchanged, mesh.get_group())
    modules: dict[str, Any] = dict(model.named_modules())
    for path in (f"{spec.blocks}.{number}.{spec.core}" for number in context.blocks(model)):
        core = modules.get(path)
        if core is None:
            raise UserError(f"context parallel: {path} is not in the model; its ModelSpec names it as core")
        core.attend_last = attend_last if context.device.type == "cuda" else None
        # Not core.forward, of which each block has one: the compiler would make a graph for each, and stop at eight.
        core.forward = partial(attend, partial(type(core).forward, core))
    note = f"Applied context parallel on {mesh.size()} ranks, "
    if not gathers:
        return [note + "exchanging tokens for heads (ulysses)"]
    make: Any = getattr(model, "attention_mask", None)
    if make is None:
        raise UserError(f"context parallel: {type(model).__name__} has no method attention_mask, as a Decoder has")

    def masks(documents: Tensor, h: Tensor) -> list[Any]:  # of each chunk, and all it can see
        return [make(documents[:, : chunk.stop], h, len(chunk)) for chunk in own_chunks(documents.size(1))]

    model.attention_mask = masks  # type: ignore[assignment]
    return [note + "all-gathering keys and values" + ", a chunk from the head and one from the tail each" * balanced]


def _gathered(
    mesh: DeviceMesh, own_chunks: Callable[[int], list[range]], attend: Callable[..., Tensor],
    q: Tensor, k: Tensor, v: Tensor, masks: Sequence[Any] | None = None,
) -> Tensor:  # fmt: skip
    """Attend from each of this rank's chunks to all tokens up to its end, of which keys and values are gathered."""
    chunks = own_chunks(q.size(TOKENS) * mesh.size())
    own = torch.stack(torch.cat((k, v), dim=HEADS).chunk(len(chunks), dim=TOKENS))
    split = DTensor.from_local(own, mesh, (Shard(0),), run_check=False)
    gathered = split.redistribute(placements=(Replicate(),)).to_local(grad_placements=(Partial(),)).unbind()
    keys, values = torch.cat(_in_order(gathered, len(chunks) > 1), dim=TOKENS).chunk(2, dim=HEADS)
    parts = zip(q.chunk(len(chunks), dim=TOKENS), chunks, masks or [None] * len(chunks), strict=True)
    return torch.cat([attend(part, keys[:, :, : c.stop], values[:, :, : c.stop], m) for part, c, m in parts], TOKENS)


def _in_order(chunks: Sequence[Any], balanced: bool) -> list[Any]:
    """Return the chunks of all ranks, which are in the order of the ranks, in that of the sequence."""
    return [*chunks[::2], *chunks[::-2]] if balanced else [*chunks]


def _exchanged(
    group: dist.ProcessGroup, attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Any = None
) -> Tensor:
    """Attend from all tokens for some of the heads; the tokens' ranks exchange these for all heads of their own."""
    q, k, v = (_Exchange.apply(group, tensor, HEADS, TOKENS) for tensor in (q, k, v))  # type: ignore[misc]
    return _Exchange.apply(group, attend(q, k, v, mask), TOKENS, HEADS)  # type: ignore[return-value]


class _Exchange(torch.autograd.Function):
    """Split one dimension over the ranks of a group and join another. (DTensor would gather all on a CPU.)"""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, tensor: Tensor, split: int, joined: int) -> Tensor:
        ctx.group, ctx.back = group, (joined, split)
        parts = torch.stack(tensor.chunk(group.size(), dim=split))
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return torch.cat(received.unbind(), dim=joined)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return None, _Exchange.apply(ctx.group, gradient, *ctx.back), None, None
