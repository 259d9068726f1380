"""Replica check: if ranks that hold the same shard of a tensor have different bytes, the run stops.

A wrong replica still trains, only its numbers are wrong. So every parameter and buffer, and after a
load also the optimizer's state, is hashed on its device. Along each dimension of the mesh the
largest and the smallest hash are compared: 32 bytes per tensor however many ranks there are, and
under plain FSDP none for the tensors that it splits.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from titanlite.errors import RunFailed, few_of
from titanlite.parallel.build import Context, named_parameters
from titanlite.parallel.dtensor import local_part, shard_offset
from titanlite.parallel.mesh import Mesh
from titanlite.registry import Rule
from titanlite.runtime.determinism import derive_seed
from titanlite.runtime.distributed import gather_objects

Hashed = tuple[str, int, int]
"""A tensor's name, a hash of its shard's place, and a hash of its content."""
_CHUNK_BYTES = {"cpu": 1 << 18, "cuda": 1 << 27}
"""Small enough for a core's cache, or large enough for a GPU; hashing needs three times as much."""
_ODD = -7046029254386353131  # 2**64 / the golden ratio, as an int64


def check_replicas(
    parts: Sequence[nn.Module],
    when: str,
    context: Context,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Compare the tensors that ranks should share; raise RunFailed if two differ.

    `when` is part of the message, such as "after initialization".
    """
    pipeline = context.job.layout.pp > 1
    own: list[Hashed] = []
    for part in parts:
        for name, tensor in _tensors(part, context.table, optimizer):
            if pipeline or not _is_split_by_all(tensor, context.mesh.stage):
                own.append((name, *_hash_shard(name, tensor)))
    wrong = set[int]()
    if own:
        hashes = torch.tensor([shard_and_content for _, *shard_and_content in own])
        for group in _groups(context.mesh):
            wrong |= _differing(hashes.to(context.device), group)
    if pipeline:
        wrong |= _differing_between_stages(own, context.mesh.world.get_group("pp"))
    is_wrong = torch.tensor(len(wrong), device=context.device)
    dist.all_reduce(is_wrong, dist.ReduceOp.MAX)
    if is_wrong.item():
        first = None
        if wrong:
            first = own[min(wrong)]
        raise RunFailed(_describe(first, when, own))


def _is_split_by_all(tensor: torch.Tensor, stage: dist.ProcessGroup) -> bool:
    """Return whether no two ranks of a stage hold the same part, as under plain FSDP."""
    if not isinstance(tensor, DTensor) or tensor.device_mesh.size() < stage.size():
        return False
    return not any(placement.is_replicate() for placement in tensor.placements)


def _groups(mesh: Mesh) -> Iterator[dist.ProcessGroup]:
    """Yield this rank's group along each dimension of the meshes, within its stage."""
    for view in filter(None, (mesh.world, mesh.experts, mesh.ep)):
        for name, size in zip(view.mesh_dim_names or (), view.shape, strict=True):
            if name != "pp" and size > 1:
                yield view.get_group(name)


def _differing(own: torch.Tensor, group: dist.ProcessGroup) -> set[int]:
    """Return the tensors that differ although all ranks of a group hold the same shard."""
    extremes = torch.cat([own, ~own])  # the smallest x is the one with the largest ~x
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group)
    largest, smallest = extremes.cpu().chunk(2)
    same_shard, same_content = (largest == ~smallest).unbind(-1)
    return {*(same_shard & ~same_content).nonzero().flatten().tolist()}


def _differing_between_stages(own: list[Hashed], group: dist.ProcessGroup) -> set[int]:
    """Return the tensors, such as a tied weight, that differ from another stage's."""
    contents: dict[tuple[str, int], set[int]] = {}
    for hashed in gather_objects(own, group):
        for name, shard, content in hashed:
            contents.setdefault((name, shard), set()).add(content)
    differing = set[int]()
    for number, (name, shard, _) in enumerate(own):
        if len(contents[name, shard]) > 1:
            differing.add(number)
    return differing


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


def _hash_shard(name: str, tensor: torch.Tensor) -> tuple[int, int]:
    """Return two hashes: of the shard's name and place, and of its content."""
    local = local_part(tensor)
    shard = derive_seed("shard", name, *shard_offset(tensor), "of", *local.shape)
    return shard, int(content_hash(local))


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


def _describe(found: Hashed | None, when: str, own: list[Hashed]) -> str:
    """Return the message about the differing tensor that the first rank to find one `found`."""
    name, shard, _ = next(filter(None, gather_objects(found, dist.group.WORLD)))
    same = [content for *which, content in own if which == [name, shard]]
    hashes = {}
    for rank, contents in enumerate(gather_objects(same, dist.group.WORLD)):
        if contents:
            hashes[rank] = contents[0]
    most_common = Counter(hashes.values()).most_common(1)[0][0]  # the first rank's in a tie
    odd = [rank for rank, content in hashes.items() if content != most_common]
    rest = [rank for rank in hashes if rank not in odd]
    return (
        f"replicas out of sync {when}: {name} on rank {few_of(odd)} differs from rank "
        f"{few_of(rest)}, though they hold the same shard; check that versions and files "
        "are the same on all hosts"
    )
