"""Replica check: ranks that hold the same shard of a tensor hold the same bytes, or the run stops.

A wrong replica still trains, and only its numbers are wrong. So every parameter and buffer, and
after a load the optimizer's state, is hashed where it is, and the hashes are compared: 16 bytes a
tensor and rank in one collective.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from titanlite.errors import RunFailed
from titanlite.parallel.build import Context, named_parameters
from titanlite.parallel.dtensor import local_part, shard_offset
from titanlite.registry import Rule
from titanlite.runtime.determinism import derive_seed
from titanlite.runtime.distributed import gather_objects

_CHUNK_BYTES = {"cpu": 1 << 18, "cuda": 1 << 27}
"""Small enough for a core's cache, large enough for a GPU; hashing takes three times the memory."""
_ODD = -7046029254386353131  # 2**64 / the golden ratio, as an int64


def check_replicas(
    parts: Sequence[nn.Module],
    when: str,
    context: Context,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Compare the tensors that ranks should have in common; raise RunFailed if two differ.

    `when` is part of the message, such as "after initialization".
    """
    tensors: list[tuple[str, torch.Tensor]] = []
    for part in parts:
        tensors += _tensors(part, context.table, optimizer)
    hashes = [_hash_shard(name, tensor, context.device) for name, tensor in tensors]
    local_hashes = torch.stack(hashes)
    count = torch.tensor(len(tensors), device=context.device)
    dist.all_reduce(count, dist.ReduceOp.MAX)  # pipeline stages have unlike numbers of tensors
    local_hashes = F.pad(local_hashes, (0, 0, 0, int(count) - len(tensors)))
    all_hashes = local_hashes.new_empty(dist.get_world_size(), *local_hashes.shape)
    # Before torch 2.14 it has only the other name, which warns since then.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(all_hashes.flatten(0, 1), local_hashes)
    shards, contents = all_hashes.cpu().unbind(-1)  # each (rank, tensor)
    _, group = shards.flatten().unique(return_inverse=True)
    numbers = torch.arange(len(group))
    first = torch.full_like(numbers, len(group)).scatter_reduce_(0, group, numbers, "amin")[group]
    differing = (contents.flatten() != contents.flatten()[first]).nonzero().flatten()
    if not len(differing):
        return
    shard = shards.flatten()[differing[0]]
    ranks, indices = (shards == shard).nonzero().unbind(-1)
    own_name = ""
    for (name, _), key in zip(tensors, local_hashes[:, 0], strict=False):
        if key == shard:
            own_name = name
            break
    known = next(filter(None, gather_objects(own_name, dist.group.WORLD)))
    raise RunFailed(_describe(known, when, ranks.tolist(), contents[ranks, indices].tolist()))


def _tensors(
    part: nn.Module, table: Mapping[str, Rule], optimizer: torch.optim.Optimizer | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a part's parameters, buffers and optimizer state, with names equal on all ranks."""
    yield from named_parameters(part, table)
    yield from part.named_buffers()
    if optimizer is None:
        return
    for name, parameter in named_parameters(part, table):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                yield f"{key} of {name}", value


def _hash_shard(name: str, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return two hashes: of the shard's name and place, and of its content."""
    local = local_part(tensor)
    shard = derive_seed("shard", name, *shard_offset(tensor), "of", *local.shape)
    return torch.stack([torch.tensor(shard, device=device), content_hash(local).to(device)])


@torch.no_grad()
def content_hash(tensor: torch.Tensor) -> torch.Tensor:
    """Return a hash of a tensor's bytes that depends on their order, the same on every device."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)  # integers that wrap around
    content = tensor.detach().reshape(-1).view(torch.uint8)
    chunk_bytes = _CHUNK_BYTES[tensor.device.type]
    starts = range(0, content.numel(), chunk_bytes)
    for start, chunk in zip(starts, content.split(chunk_bytes), strict=False):
        integers = F.pad(chunk, (0, -chunk.numel() % 8)).view(torch.int64)  # a copy, aligned
        first = start // 8 + 1
        weights = torch.arange(first, first + integers.numel(), device=tensor.device).mul_(_ODD)
        total += integers.mul_(weights.bitwise_xor_(weights >> 29).bitwise_or_(1)).sum()
    return total


def _describe(name: str, when: str, ranks: list[int], hashes: list[int]) -> str:
    most_common = Counter(hashes).most_common(1)[0][0]  # the first rank's in a draw
    odd = []
    rest = []
    for rank, value in zip(ranks, hashes, strict=True):
        if value == most_common:
            rest.append(rank)
        else:
            odd.append(rank)
    return (
        f"replicas out of sync {when}: {name} on rank {_format_ranks(odd)} differs from rank "
        f"{_format_ranks(rest)}, though they hold the same shard; check that versions and files "
        "are the same on all hosts"
    )


def _format_ranks(ranks: list[int]) -> str:
    text = ", ".join(map(str, ranks[:8]))
    if len(ranks) > 8:
        text += f" and {len(ranks) - 8} more"
    return text
