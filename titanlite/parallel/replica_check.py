"""Replicas agree: ranks that hold the same shard of a tensor hold the same bytes, or the run stops.

A wrong replica still trains, and nothing but the numbers is wrong. So every parameter and buffer, and after a load
the optimizer's state, is hashed where it lies, and the hashes are compared: 16 bytes a tensor and rank in one
collective.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from titanlite.errors import UserError
from titanlite.parallel.dtensor import local_part, shard_offset
from titanlite.runtime.determinism import derive_seed

_BYTES_AT_A_TIME = {"cpu": 1 << 18, "cuda": 1 << 27}
"""Small enough for a core's cache, large enough for a GPU; hashing takes about three times as much memory."""
_ODD = -7046029254386353131  # 2**64 / the golden ratio, as an int64


def check_replicas(
    model: nn.Module, when: str, device: torch.device, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Compare what should be equal across ranks; `when` ends the message, such as "after initialization"."""
    tensors = [*model.named_parameters(), *model.named_buffers(), *(_state_of(model, optimizer) if optimizer else ())]
    mine = torch.stack([_shard_and_content(tensor, device) for _, tensor in tensors])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    shards, contents = torch.stack(everyone).cpu().unbind(-1)  # each (rank, tensor)
    for number, (name, _) in enumerate(tensors):
        for ranks in _same_shard(shards[:, number]):
            held = contents[ranks, number]
            if (held != held[0]).any():
                raise UserError(_describe(name, when, ranks.tolist(), held.tolist()))


def _state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                yield f"{key} of {name}", value


def _shard_and_content(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Which part of the full tensor this rank holds, and a hash of what it holds."""
    offset = shard_offset(tensor) if isinstance(tensor, DTensor) else ()
    local = local_part(tensor)
    shard = torch.tensor(derive_seed("shard", *offset, "of", *local.shape), device=device)
    return torch.stack([shard, content_hash(local).to(device)])


@torch.no_grad()
def content_hash(tensor: torch.Tensor) -> torch.Tensor:
    """A hash of a tensor's bits that depends on their order: integers that wrap around, the same on every device."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    content = tensor.detach().reshape(-1).view(torch.uint8)
    step = _BYTES_AT_A_TIME[tensor.device.type]
    for start, part in zip(range(0, content.numel(), step), content.split(step), strict=False):
        words = F.pad(part, (0, -part.numel() % 8)).view(torch.int64)  # a copy, aligned
        place = start // 8
        weights = torch.arange(place + 1, place + 1 + words.numel(), device=tensor.device).mul_(_ODD)
        total += words.mul_(weights.bitwise_xor_(weights >> 29).bitwise_or_(1)).sum()
    return total


def _same_shard(shards: torch.Tensor) -> Iterator[torch.Tensor]:
    """Ranks, in groups that hold the same shard."""
    kinds, group = shards.unique(return_inverse=True)
    order = group.argsort(stable=True)
    yield from order.split(group.bincount(minlength=kinds.numel()).tolist())


def _describe(name: str, when: str, ranks: list[int], held: list[int]) -> str:
    common = Counter(held).most_common(1)[0][0]  # the first rank's, where there are as many of each
    odd = [rank for rank, content in zip(ranks, held, strict=True) if content != common]
    others = [rank for rank, content in zip(ranks, held, strict=True) if content == common]
    return (
        f"replicas differ {when}: {name} on rank {_listed(odd)} is not what it is on rank {_listed(others)}, "
        "though these ranks should hold the same values; are versions and files the same on all hosts?"
    )


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
