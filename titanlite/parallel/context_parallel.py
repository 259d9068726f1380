"""Context parallel: ranks split each sequence, and attention sees the keys and values of all.

Only attention's core mixes tokens, so only the core communicates: "allgather" gathers keys and
values, and attends from a rank's tokens; "ulysses" exchanges tokens for heads, and attends from all
tokens for some of the heads. The rest of a model treats each token by itself, at the position that
is passed to it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from titanlite.config.job import Job
from titanlite.errors import UserError
from titanlite.parallel.build import Context
from titanlite.parallel.collectives import AllToAll
from titanlite.parallel.last_attention import TOKENS, last_attention

HEADS = 1  # a dimension of queries, keys and values, like TOKENS


@dataclass(frozen=True)
class TokenShare:
    """This rank's share of the tokens of a batch; by default all of them, as in one process."""

    device: torch.device
    own_positions: Callable[[int], Tensor | None] = lambda length: None
    """The positions of this rank's tokens in a sequence of that length; None for all."""
    multiple: int = 1
    """Sequences are padded to a multiple of this length."""
    loss_ranks: dist.ProcessGroup | None = None
    """The ranks that have a part of the loss."""
    sequence_ranks: dist.ProcessGroup | None = None
    """The ranks that share a sequence's tokens under context parallel."""


def token_share(context: Context, rank: int) -> TokenShare:
    """Return the share of a rank of the job's mesh."""
    job = context.job
    sequence_ranks = None
    if job.layout.cp > 1:
        sequence_ranks = context.mesh.world.get_group("cp")
    return TokenShare(
        context.device,
        cache(partial(own_positions, job, rank, context.device)),
        sequence_multiple(job),
        context.mesh.loss,
        sequence_ranks,
    )


def rank_chunks(tokens: int, degree: int, rank: int, balanced: bool) -> list[range]:
    """Return a rank's chunks of a sequence: one, or if balanced one each from head and tail.

    The two chunks together see (2 x degree + 1) x chunk^2 pairs of tokens on every rank, counting
    all pairs within a chunk.
    """
    numbers = [rank]
    if balanced:
        numbers.append(2 * degree - 1 - rank)
    chunk = tokens // degree // len(numbers)
    return [range(number * chunk, (number + 1) * chunk) for number in numbers]


def own_positions(job: Job, rank: int, device: torch.device, tokens: int) -> Tensor | None:
    """Return the positions of a rank's tokens in a sequence.

    None if the rank has all of them, and no later pipeline stage needs the positions.
    """
    if job.layout.cp == job.layout.pp == 1:
        return None
    rank_of_sequence = job.layout.coordinates(rank)["cp"]
    chunks = rank_chunks(tokens, job.layout.cp, rank_of_sequence, is_balanced(job))
    return torch.cat([torch.arange(chunk.start, chunk.stop, device=device) for chunk in chunks])


def sequence_multiple(job: Job) -> int:
    """Return the number that must divide a sequence's length."""
    chunks = 1
    if is_balanced(job):
        chunks = 2
    return job.layout.cp * job.layout.tp * chunks


def is_balanced(job: Job) -> bool:
    """Return whether ranks have chunks from head and tail; "ulysses" needs no balance."""
    settings = job.config.parallelism
    if job.layout.cp == 1 or settings.context_parallel_rotate_method != "allgather":
        return False
    return settings.context_parallel_load_balancer == "headtail"


def apply(model: nn.Module, context: Context) -> list[str]:
    """Let the core of every block's attention see the tokens of all ranks."""
    job = context.job
    if job.layout.cp == 1:
        return []
    mesh = context.mesh.world["cp"]
    note = f"Applied context parallel on {mesh.size()} ranks"
    if job.config.parallelism.context_parallel_rotate_method != "allgather":
        _replace_cores(model, context, partial(_attend_to_some_heads, mesh.get_group()))
        return [note + ", exchanging tokens for heads (ulysses)"]
    balanced = is_balanced(job)
    rank = mesh.get_local_rank()
    own_chunks = partial(rank_chunks, degree=mesh.size(), rank=rank, balanced=balanced)
    _replace_cores(model, context, partial(_attend_to_all_tokens, mesh, own_chunks))
    _make_masks_of_chunks(model, own_chunks)
    note += ", all-gathering keys and values"
    if balanced:
        note += ", a chunk from the head and one from the tail each"
    return [note]


def _replace_cores(model: nn.Module, context: Context, attend: Callable[..., Tensor]) -> None:
    """Let `attend` call the forward method of every block's attention core."""
    spec = context.job.spec
    modules: dict[str, Any] = dict(model.named_modules())
    attend_last = None
    if context.device.type == "cuda":
        attend_last = last_attention(context.device)
    for number in context.blocks(model):
        path = f"{spec.blocks}.{number}.{spec.core}"
        core = modules.get(path)
        if core is None:
            raise UserError(
                f"context parallel: {path} is not in the model; its ModelSpec names it as core"
            )
        core.attend_last = attend_last
        # Not core.forward, which differs by block: the compiler would build a graph for each, and
        # give up after eight.
        core.forward = partial(attend, partial(type(core).forward, core))


def _make_masks_of_chunks(model: nn.Module, own_chunks: Callable[[int], list[range]]) -> None:
    """Build the model's masks for each of this rank's chunks, over all tokens that each sees."""
    make: Any = getattr(model, "attention_mask", None)
    if make is None:
        raise UserError(
            f"context parallel: {type(model).__name__} has no method attention_mask, "
            "as a Decoder has"
        )

    def masks(documents: Tensor, h: Tensor) -> list[Any]:
        chunks = own_chunks(documents.size(1))
        return [make(documents[:, : chunk.stop], h, len(chunk)) for chunk in chunks]

    model.attention_mask = masks  # type: ignore[assignment]


def _attend_to_all_tokens(
    mesh: DeviceMesh,
    own_chunks: Callable[[int], list[range]],
    attend: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    masks: Sequence[Any] | None = None,
) -> Tensor:
    """Gather keys and values; attend from each own chunk to all tokens up to its end."""
    chunks = own_chunks(q.size(TOKENS) * mesh.size())
    count = len(chunks)
    own = torch.stack(torch.cat((k, v), dim=HEADS).chunk(count, dim=TOKENS))
    split = DTensor.from_local(own, mesh, (Shard(0),), run_check=False)
    whole = split.redistribute(placements=(Replicate(),))
    gathered = whole.to_local(grad_placements=(Partial(),)).unbind()
    in_order = _in_order(gathered, count > 1)
    keys, values = torch.cat(in_order, dim=TOKENS).chunk(2, dim=HEADS)
    parts = q.chunk(count, dim=TOKENS)
    if masks is None:
        masks = [None] * count
    outputs = []
    for part, chunk, mask in zip(parts, chunks, masks, strict=True):
        outputs.append(attend(part, keys[:, :, : chunk.stop], values[:, :, : chunk.stop], mask))
    return torch.cat(outputs, TOKENS)


def _in_order(chunks: Sequence[Any], balanced: bool) -> list[Any]:
    """Return the chunks of all ranks, given in the ranks' order, in the sequence's order."""
    if not balanced:
        return [*chunks]
    return [*chunks[::2], *chunks[::-2]]


def _attend_to_some_heads(
    group: dist.ProcessGroup,
    attend: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any = None,
) -> Tensor:
    """Exchange all heads of this rank's tokens for some heads of all tokens, attend, and exchange
    back.
    """
    queries = _all_to_all(group, q, HEADS, TOKENS)
    keys = _all_to_all(group, k, HEADS, TOKENS)
    values = _all_to_all(group, v, HEADS, TOKENS)
    attended = attend(queries, keys, values, mask)
    return _all_to_all(group, attended, TOKENS, HEADS)


def _all_to_all(group: dist.ProcessGroup, tensor: Tensor, split: int, joined: int) -> Tensor:
    """Split one dimension over the ranks of a group and join another."""
    parts = torch.stack(tensor.chunk(group.size(), dim=split))
    received = AllToAll.apply(parts, group)
    return torch.cat(received.unbind(), dim=joined)
