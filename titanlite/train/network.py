"""How fast the ranks reach each other: groups of the mesh are timed, and pairs of ranks.

In round k the halves of every block of 2^(k+1) ranks exchange data. After log2(n) rounds a slow
rank, slow with each of its partners, can be distinguished from a slow link. The rounds are the same
on all ranks whatever they find: no rank waits for one that does something else.
"""

import os
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from statistics import median_low
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from titanlite.parallel.collectives import swap
from titanlite.runtime.cluster import read_number
from titanlite.runtime.distributed import gather_on_rank_0
from titanlite.runtime.rank_files import ATTEMPT
from titanlite.train.rank_facts import Facts, agreement, named, notable

Seconds = tuple[int, float]
"""Bytes that a rank sent, and its shortest time for them."""
BYTES, PROBE, REPEATS, LONGEST_SECONDS = 8_000_000, 64, 3, 0.25
"""Bytes to send.

The divisor of a first probe; repetitions; less is sent where one would take longer than this.
"""
NOISE_SECONDS = {"cpu": 0.05, "cuda": 0.0005}
"""Smaller differences are the scheduler's rather than the network's."""
SLOW_NETWORK = 0.1e9
"""Bytes a second between hosts that are named though nothing is faster: gigabit Ethernet has
0.12e9.
"""


@dataclass(frozen=True)
class Timed:
    """A transfer of `size` bytes in a group or a pair of ranks."""

    ranks: tuple[int, ...]
    size: int
    seconds: float
    typical: float = 0.0
    """Seconds of its peers: transfers at the same time, likewise inside hosts or between them."""
    slow: bool = False

    @property
    def bandwidth(self) -> float:
        """Return the bytes a second that each rank of an all-reduce sends, as nccl-tests counts
        them.
        """
        return 2 * (len(self.ranks) - 1) / len(self.ranks) * self.size / self.seconds


def check_network(mesh: DeviceMesh, device: torch.device, facts: Sequence[Facts]) -> list[str]:
    """Return the lines of the preflight on rank 0, which has the facts, and elsewhere nothing.

    A later attempt of a launcher does not time its network again.
    """
    again = read_number(os.environ, ATTEMPT, 1) > 1
    groups, rounds = ({}, []) if again else measure(mesh, device)
    if dist.get_rank() > 0:
        return []
    parts = []
    for name, timed in groups.items():
        slowest = max(timed, key=lambda one: one.seconds)
        took = f"{slowest.size / 1e6:.2g} MB in {1e3 * slowest.seconds:.3g} ms"
        parts.append(f"{name} {len(slowest.ranks)}: {took}, {slowest.bandwidth / 1e9:.2g} GB/s")
    warnings = [
        f"warning: {line}" for line in (*notable(facts), *slow_parts(groups, rounds, facts))
    ]
    lines = [f"preflight  {agreement(facts)}", *warnings]
    if groups:
        lines.insert(1, f"network    all-reduce over {'; '.join(parts)}")
    return lines


def measure(
    mesh: DeviceMesh, device: torch.device
) -> tuple[dict[str, list[Timed]], list[list[Timed]]]:
    """Return the times of the groups of each dimension and of the pairs of each round, on rank
    0.

    Which ranks these are follows from the mesh: a rank sends only what it has measured.
    """
    rank = dist.get_rank()
    world = dist.get_world_size()
    groups: dict[str, Seconds] = {}
    rounds: list[Seconds] = []
    for name, size in zip(mesh.mesh_dim_names or (), mesh.shape, strict=True):
        if size > 1:
            groups[name] = _time(partial(dist.all_reduce, group=mesh.get_group(name)), device)
    # NCCL keeps buffers for every pair: in a group of its own they are freed with it.
    pairs: Any = dist.new_group(backend="nccl") if device.type == "cuda" else dist.group.WORLD
    for bit in range((world - 1).bit_length()):
        peer = rank ^ (1 << bit)
        action = torch.Tensor.detach  # without a partner there is nothing to time
        if peer < world:
            action = partial(swap, peer=peer, group=pairs)
        rounds.append(_time(action, device))
    if device.type == "cuda":
        dist.destroy_process_group(pairs)
    everyone = gather_on_rank_0((groups, rounds))
    if rank > 0:
        return {}, []
    by_name = {
        name: _timed_groups(mesh, name, [seen[name] for seen, _ in everyone]) for name in groups
    }
    return by_name, [
        _timed_pairs(bit, [seen[bit] for _, seen in everyone]) for bit in range(len(rounds))
    ]


def _timed_groups(mesh: DeviceMesh, name: str, seen: Sequence[Seconds]) -> list[Timed]:
    """Return the groups of a dimension, each with the shortest time of its ranks."""
    dimension = (mesh.mesh_dim_names or ()).index(name)
    groups = mesh.mesh.movedim(dimension, -1).reshape(-1, mesh.shape[dimension]).tolist()
    return [
        Timed(tuple(ranks), *min((seen[rank] for rank in ranks), key=itemgetter(1)))
        for ranks in groups
    ]


def _timed_pairs(bit: int, seen: Sequence[Seconds]) -> list[Timed]:
    """Return the pairs of a round, each with the shortest time of both."""
    timed = []
    for rank, (size, seconds) in enumerate(seen):
        peer = rank ^ (1 << bit)
        if rank < peer < len(seen):
            timed.append(Timed((rank, peer), size, min(seconds, seen[peer][1])))
    return timed


def _time(action: Callable[[torch.Tensor], object], device: torch.device) -> Seconds:
    """Return the bytes that an action was given, and its shortest time.

    All ranks begin each together.
    """

    def seconds(part: torch.Tensor) -> float:
        dist.barrier()
        start = time.perf_counter()
        action(part)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    data = torch.zeros(BYTES // 4, device=device)
    probe = data[: len(data) // PROBE]
    seconds(probe)  # connects
    slowest = torch.tensor(seconds(probe), device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)  # so that all ranks send the same
    share = min(1.0, LONGEST_SECONDS / (PROBE * slowest.item()))
    data = data[: max(1, int(share * len(data)))]
    return data.nbytes, min(
        seconds(data) for _ in range(REPEATS if slowest.item() < LONGEST_SECONDS else 1)
    )


def slow_parts(
    groups: dict[str, list[Timed]], rounds: list[list[Timed]], facts: Sequence[Facts]
) -> list[str]:
    """Return hosts, ranks, links, and groups without these, that take twice as long as their
    peers.
    """
    hosts, lines, explained = [own.host for own in facts], list[str](), set[int]()
    judge = partial(_judge, hosts=hosts, noise=NOISE_SECONDS[facts[0].device])

    def name(what: str, ranks: Iterable[int], those: Sequence[Timed]) -> None:
        least = min(those, key=lambda one: one.seconds)
        took = (
            f"{'at least ' * (len(those) > 1)}{1e3 * least.seconds:.3g} ms "
            f"for {least.size / 1e6:.2g} MB"
        )
        lines.append(
            f"slow {what}: {named([facts[r] for r in ranks])}, {took}, "
            f"peers {1e3 * least.typical:.3g} ms"
        )

    pairs = [pair for timed in rounds for pair in judge(timed)]
    for kind, part_of in (("host", hosts), ("rank", range(len(facts)))):
        apart = {pair: {part_of[rank] for rank in pair.ranks} for pair in pairs}
        apart = {pair: parts for pair, parts in apart.items() if len(parts) > 1}
        for part in _always_slow((*parts, pair.slow) for pair, parts in apart.items()):
            members = [rank for rank in range(len(facts)) if part_of[rank] == part]
            name(
                f"with each {kind} tried",
                members,
                [pair for pair, parts in apart.items() if part in parts],
            )
            explained |= {*members}
        pairs = [pair for pair in pairs if not explained & {*pair.ranks}]
    for pair in pairs:
        if pair.slow:
            name("with each other", pair.ranks, [pair])
            explained |= {*pair.ranks}
    for dimension, timed in groups.items():
        for group in judge(timed):
            if explained & {*group.ranks}:
                continue
            if group.slow:
                name(f"group of {dimension}", group.ranks, [group])
            elif group.bandwidth < SLOW_NETWORK and len({hosts[rank] for rank in group.ranks}) > 1:
                name(
                    f"network between hosts ({group.bandwidth / 1e9:.2g} GB/s)",
                    group.ranks,
                    [group],
                )
    return lines


def _judge(timed: Sequence[Timed], hosts: Sequence[str], noise: float) -> list[Timed]:
    inside, between = list[Timed](), list[Timed]()
    for one in timed:
        crosses = any(hosts[rank] != hosts[one.ranks[0]] for rank in one.ranks)
        (between if crosses else inside).append(one)
    judged = []
    for peers in filter(None, (inside, between)):
        typical = median_low(one.seconds for one in peers)
        limit = typical + max(typical, noise)
        judged += [replace(one, typical=typical, slow=one.seconds > limit) for one in peers]
    return judged


def _always_slow(pairs: Iterable[tuple[Hashable, ...]]) -> list[Hashable]:
    """Return who met two partners or more, and was slow with each."""
    met: dict[Hashable, dict[Hashable, bool]] = defaultdict(dict)
    for one, other, slow in pairs:
        met[one][other] = met[other][one] = bool(slow) and met[one].get(other, True)
    return [key for key, partners in met.items() if len(partners) > 1 and all(partners.values())]
