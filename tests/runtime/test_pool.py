"""The pool names the rank that fails, dies or is late, and works again after."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from titanlite.runtime.pool import Pool, RankFailed


def total() -> float:
    value = torch.ones(()) * (dist.get_rank() + 1)
    dist.all_reduce(value)
    return value.item()


def misbehave(rank: int, what: str) -> str:
    if dist.get_rank() == rank:
        if what == "raise":
            raise ValueError("here")
        if what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1000)
    if what != "raise":
        dist.barrier()
    return "fine"


def test_a_function_runs_on_as_many_ranks_as_asked(pool):
    assert pool.run(total, world=1) == [1.0]
    assert pool.run(total, world=3) == [6.0] * 3


def test_a_rank_that_raises_is_named_with_its_traceback(pool):
    with pytest.raises(RankFailed, match="(?s)rank 1 of 2 raised:.*ValueError: here"):
        pool.run(misbehave, 1, "raise", world=2)
    assert pool.run(total, world=2) == [3.0] * 2


def test_dead_and_late_ranks_are_named_and_the_pool_recovers():
    small = Pool(2)
    try:
        with pytest.raises(RankFailed, match="rank 1 died .exit code -9"):
            small.run(misbehave, 1, "die", world=2)
        with pytest.raises(RankFailed, match="(?s)no answer within 2 s from rank .*1.*in misbehave"):
            small.run(misbehave, 1, "sleep", world=2, timeout=2)
        assert small.run(total) == [3.0] * 2
    finally:
        small.close()
