"""The pool names the rank that fails, dies or is late, and works again afterwards."""

import os
import signal
import sys
import time
from multiprocessing import get_context
from typing import Any

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


@pytest.mark.long
def test_dead_and_late_ranks_are_named_and_the_pool_recovers(small, tmp_path):
    with refused("rank 1 died", "-9", kind=RankFailed):
        small.run(misbehave, 1, "die", world=2)
    assert small.run(total) == [3.0] * 2, "in new processes"
    with refused("within 2 s", "rank 0, 1", "in misbehave", kind=RankFailed):
        small.run(misbehave, 1, "sleep", world=2, timeout=2)
    assert small.run(total) == [3.0] * 2
    printed = (tmp_path / "stderr.log").read_text()
    assert printed.splitlines() == ["die", "sleep"], "what ranks print to their stderr"


def test_a_late_rank_that_has_not_started_is_named(tmp_path):
    """It waits for a reader of its log before it can take work or a signal."""
    os.mkfifo(tmp_path / "log")
    small = Pool(1, log=str(tmp_path / "log"))
    try:
        with refused("within 1 s", "rank 0 has not started", kind=RankFailed):
            small.run(total, timeout=1)
        assert small._processes == [], "ended"
    finally:
        small.close()


def has_loaded(module: str) -> bool:
    return module in sys.modules


@pytest.mark.long
def test_ranks_have_the_preloaded_modules_whatever_fork_server_ran_first():
    earlier = get_context("forkserver").Process(target=int)
    earlier.start()
    earlier.join()
    small = Pool(1, ["colorsys"])
    try:
        assert small.run(has_loaded, "colorsys") == [True]
    finally:
        small.close()


def threads_of_gloo() -> int:
    assert dist.group.WORLD
    gloo: Any = dist.group.WORLD._get_backend(torch.device("cpu"))
    dist.barrier()
    return gloo.options._threads


def test_a_group_has_one_thread_of_gloo_since_two_damage_the_heap():
    small = Pool(1)
    try:
        assert small.run(threads_of_gloo) == [1]
    finally:
        small.close()
