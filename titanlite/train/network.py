"""How fast the ranks reach each other: groups of the mesh are timed, and pairs of ranks.

In round k the halves of every block of 2^(k+1) ranks exchange data. After log2(n) rounds a slow
rank, slow with each of its partners, can be distinguished from a slow link. The rounds are the same
on all ranks whatever they find: no rank waits for one that does something else.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median_low
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from titanlite.parallel.collectives import swap
from titanlite.runtime.distributed import gather_on_rank_0
from titanlite.train.rank_facts import Facts, agreement, named, notable

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
    """A transfer of `size` bytes in a group or a pair of ranks.

    In none if a rank has no partner.
    """

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
    """Return the lines of the preflight on rank 0, which has the facts, and elsewhere nothing."""
    groups, rounds = measure(mesh, device)
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
    return [
        f"preflight  {agreement(facts)}",
        f"network    all-reduce over {'; '.join(parts)}",
        *warnings,
    ]


def measure(
    mesh: DeviceMesh, device: torch.device
) -> tuple[dict[str, list[Timed]], list[list[Timed]]]:
    """Return the times of the groups of each dimension and of the pairs of each round, on rank
    0.
    """
    rank = dist.get_rank()
    world = dist.get_world_size()
    groups: dict[str, Timed] = {}
    rounds: list[Timed] = []
    for name in mesh.mesh_dim_names or ():
        group = mesh.get_group(name)
        if len(ranks := dist.get_process_group_ranks(group)) > 1:
            groups[name] = Timed(
                tuple(ranks), *_time(partial(dist.all_reduce, group=group), device)
            )
    # NCCL keeps buffers for every pair: in a group of its own they are freed with it.
    pairs: Any = dist.new_group() if device.type == "cuda" else dist.group.WORLD
    for bit in range((world - 1).bit_length()):
        peer = rank ^ (1 << bit)
        ranks, action = (), torch.Tensor.detach  # without a partner there is nothing to time
        if peer < world:
            ranks, action = tuple(sorted((rank, peer))), partial(swap, peer=peer, group=pairs)
        rounds.append(Timed(ranks, *_time(action, device)))
    if device.type == "cuda":
        dist.destroy_process_group(pairs)
    everyone = gather_on_rank_0((groups, rounds))
    by_name = {name: [seen[name] for seen, _ in everyone] for name in groups}
    return by_name, [[seen[number] for _, seen in everyone] for number in range(len(rounds))]


def _time(action: Callable[[torch.Tensor], object], device: torch.device) -> tuple[int, float]:
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
    peers: dict[bool, dict[tuple[int, ...], Timed]] = {False: {}, True: {}}
    # The shortest time of its ranks is kept.
    for one in sorted(timed, key=lambda one: -one.seconds):
        if one.ranks:
            peers[len({hosts[rank] for rank in one.ranks}) > 1][one.ranks] = one
    judged = []
    for group in filter(None, peers.values()):
        typical = median_low(one.seconds for one in group.values())
        limit = typical + max(typical, noise)
        judged += [
            replace(one, typical=typical, slow=one.seconds > limit) for one in group.values()
        ]
    return judged


def _always_slow(pairs: Iterable[tuple[Hashable, ...]]) -> list[Hashable]:
    """Return who met two partners or more, and was slow with each."""
    met: dict[Hashable, dict[Hashable, bool]] = defaultdict(dict)
    for one, other, slow in pairs:
        met[one][other] = met[other][one] = bool(slow) and met[one].get(other, True)
    return [key for key, partners in met.items() if len(partners) > 1 and all(partners.values())]
