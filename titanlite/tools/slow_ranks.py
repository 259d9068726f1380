"""Find slow ranks and hosts from exchanges between pairs of ranks, for `titanlite doctor`.

In round k, rank r exchanges data with rank r XOR 2^k, all pairs at once. A rank that is slow with
each of several partners is slow itself; a single slow pair may be a slow link, and is not reported.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from statistics import median_low
from typing import Any

import torch
import torch.distributed as dist

from titanlite.parallel.collectives import swap
from titanlite.runtime.distributed import gather_on_rank_0
from titanlite.train.network import shortest_time
from titanlite.train.rank_facts import RankFacts, named

NOISE_SECONDS = {"cpu": 0.05, "cuda": 0.0005}
"""Smaller differences are caused by the scheduler rather than the network."""
FEWEST_PARTNERS = 2
"""With fewer partners, a rank can't be distinguished from its link."""


@dataclass(frozen=True)
class Exchange:
    """One exchange, as measured by a rank."""

    rank: int
    partner: int
    size: int
    seconds: float


@dataclass(frozen=True)
class Judged:
    """An exchange compared with others of its round that are also inside hosts, or between them."""

    exchange: Exchange
    between_hosts: bool
    typical: float
    """The median in seconds."""
    slow: bool


def exchange_in_pairs(device: torch.device) -> list[list[Exchange]]:
    """Return the exchanges of each round on rank 0, and nothing on other ranks."""
    rank = dist.get_rank()
    world = dist.get_world_size()
    everyone: Any = dist.group.WORLD
    own: list[Exchange | None] = []
    for number in range((world - 1).bit_length()):
        partner = rank ^ (1 << number)
        if partner < world:
            transfer = partial(swap, peer=partner, group=everyone)
            own.append(Exchange(rank, partner, *shortest_time(transfer, device)))
        else:
            shortest_time(torch.Tensor.detach, device)  # joins the barriers of other transfers
            own.append(None)
    seen = gather_on_rank_0(own)
    if rank > 0:
        return []
    return [[*filter(None, of_round)] for of_round in zip(*seen, strict=True)]


def slow_ranks(rounds: Sequence[Sequence[Exchange]], facts: Sequence[RankFacts]) -> list[str]:
    """Return a line for the ranks that are slow with every partner, and one for those that are
    slow with every partner on another host.
    """
    met: dict[int, list[Judged]] = defaultdict(list)
    for exchanges in rounds:
        for judged in _judge(exchanges, facts):
            met[judged.exchange.rank].append(judged)
    slow: dict[int, list[Judged]] = {}
    slow_between: dict[int, list[Judged]] = {}
    for rank, judged in sorted(met.items()):
        between = [one for one in judged if one.between_hosts]
        if _always_slow(judged):
            slow[rank] = judged
        elif _always_slow(between):
            slow_between[rank] = between
    lines = []
    for what, found in (("every partner", slow), ("every other host", slow_between)):
        if found:
            fastest = min(chain(*found.values()), key=lambda one: one.exchange.seconds)
            took = f"{1e3 * fastest.exchange.seconds:.3g} ms"
            size = f"{fastest.exchange.size / 1e6:.2g} MB"
            ranks = named([facts[rank] for rank in found])
            lines.append(
                f"slow with {what}: {ranks}, at least {took} for {size}, "
                f"the median is {1e3 * fastest.typical:.3g} ms"
            )
    return lines


def _judge(exchanges: Sequence[Exchange], facts: Sequence[RankFacts]) -> list[Judged]:
    """Compare the exchanges of a round: those inside hosts, and those between hosts."""
    noise = NOISE_SECONDS[facts[0].device]
    judged = []
    for between in (False, True):
        peers = []
        for one in exchanges:
            if (facts[one.rank].host != facts[one.partner].host) == between:
                peers.append(one)
        if peers:
            typical = median_low(one.seconds for one in peers)
            limit = typical + max(typical, noise)
            judged += [Judged(one, between, typical, one.seconds > limit) for one in peers]
    return judged


def _always_slow(judged: Sequence[Judged]) -> bool:
    return len(judged) >= FEWEST_PARTNERS and all(one.slow for one in judged)
