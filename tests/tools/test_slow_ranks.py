"""`titanlite doctor` names ranks and hosts that are slow with all others."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.messages import says
from tests.train.test_rank_facts import some
from titanlite.tools.slow_ranks import Exchange, exchange_in_pairs, slow_ranks


def rounds(world: int, is_slow: Callable[[int, int], bool]) -> list[list[Exchange]]:
    """Return the exchanges of this many ranks, of which some are slow."""
    found = []
    for bit in range((world - 1).bit_length()):
        seen = []
        for rank in range(world):
            partner = rank ^ (1 << bit)
            if partner < world:
                seconds = 0.4 if is_slow(rank, partner) else 0.1
                seen.append(Exchange(rank, partner, 8_000_000, seconds))
        found.append(seen)
    return found


@pytest.mark.parametrize("world", [4, 6, 64])
def test_a_rank_or_a_host_that_is_slow_with_all_is_named_and_a_link_is_not(world):
    ranks = [some(rank) for rank in range(world)]  # two on a host

    def named(is_slow: Callable[[int, int], bool]) -> list[str]:
        return [line.partition(",")[0] for line in slow_ranks(rounds(world, is_slow), ranks)]

    assert named(lambda a, b: False) == named(lambda a, b: True) == []
    for one in range(4):
        host = one // 2
        assert named(lambda a, b, one=one: one in (a, b)) == [
            f"slow with every partner: rank {one} on host{host}"
        ]
        assert named(lambda a, b, one=one: {a, b} == {one, one ^ 1}) == []
    if world == 64:  # of two or three hosts a round has one pair, and nothing to compare it with
        found = named(lambda a, b: a // 2 != b // 2 and 1 in (a // 2, b // 2))
        assert found == ["slow with every other host: ranks 2-3 on host1"]


def lines_with_a_late_rank(late: int) -> list[str]:
    """Exchange data in pairs, to each of which a rank is late; return what is named."""
    original = dist.batch_isend_irecv

    def call(*arguments: Any) -> Any:
        time.sleep(0.4)
        return original(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == late:
            patch.setattr(dist, "batch_isend_irecv", call)
        found = exchange_in_pairs(torch.device("cpu"))
    return slow_ranks(found, [some(rank) for rank in range(dist.get_world_size())])


def test_a_rank_that_is_late_is_named_on_rank_0(pool):
    (line,), *others = pool.run(lines_with_a_late_rank, 3, world=4)
    assert others == [[]] * 3
    says(line, "slow with every partner", "rank 3 on host1", " MB, the median is ")
