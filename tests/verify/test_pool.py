"""The pool names the rank that fails, dies or is late, and works again afterwards."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.messages import refused
from titanlite.verify.pool import Pool, RankFailed


def total() -> float:
    value = torch.ones(()) * (dist.get_rank() + 1)
    dist.all_reduce(value)
    return value.item()


def misbehave(rank: int, what: str) -> str:
    if dist.get_rank() == rank:
        os.write(2, f"{what}\n".encode())
        if what == "raise":
            raise ValueError("here")
        if what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1000)
    if what != "raise":
        dist.barrier()
    return "fine"


def test_a_function_runs_on_the_given_number_of_ranks(pool):
    assert pool.run(total, world=1) == [1.0]
    assert pool.run(total, world=3) == [6.0] * 3


def test_a_rank_that_raises_is_named_with_its_traceback(pool):
    with refused("rank 1 of 2", "ValueError: here", kind=RankFailed):
        pool.run(misbehave, 1, "raise", world=2)
    assert pool.run(total, world=2) == [3.0] * 2


def die_after_a_peer_raised() -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        raise ValueError("connection closed by peer")
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def small(tmp_path):
    log = tmp_path / "stderr.log"
    log.touch()
    ranks = Pool(2, log=str(log))
    yield ranks
    ranks.close()


def test_a_dead_rank_is_named_where_another_was_heard_first(small):
    with refused("rank 1 died, exit code -9", "rank 0 of 2", "by peer", kind=RankFailed) as caught:
        small.run(die_after_a_peer_raised, world=2)
    assert str(caught.value).startswith("rank 1")


def test_dead_and_late_ranks_are_named_and_the_pool_recovers(small, tmp_path):
    with refused("rank 1 died", "-9", kind=RankFailed):
        small.run(misbehave, 1, "die", world=2)
    assert small.run(total) == [3.0] * 2, "in new processes"
    with refused("within 2 s", "rank 0, 1", "in misbehave", kind=RankFailed):
        small.run(misbehave, 1, "sleep", world=2, timeout=2)
    assert small.run(total) == [3.0] * 2
    printed = (tmp_path / "stderr.log").read_text()
    assert printed.splitlines() == ["die", "sleep"], "what ranks print to their stderr"
