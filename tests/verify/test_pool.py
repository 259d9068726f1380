"""The pool names the rank that fails, dies or is late, and works again afterwards."""

import os
import signal
import sys
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from titanlite.verify.pool import Pool, RankFailed


def total() -> float:
    value = torch.ones(()) * (dist.get_rank() + 1)
    dist.all_reduce(value)
    return value.item()


def misbehave(rank: int, what: str) -> str:
    if dist.get_rank() == rank:
        os.write(2, f"about to {what}\n".encode())
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
    with pytest.raises(RankFailed, match="(?s)rank 1 of 2 raised:.*ValueError: here"):
        pool.run(misbehave, 1, "raise", world=2)
    assert pool.run(total, world=2) == [3.0] * 2


def group_of_a_mesh() -> str:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("outer", "inner"))
    total = torch.ones(())
    dist.all_reduce(total, group=mesh.get_group("outer"))
    assert total == 1
    return mesh.get_group("outer").group_name


def test_equal_meshes_of_two_runs_share_their_groups_unless_a_run_failed(pool):
    first, second = (pool.run(group_of_a_mesh, world=2) for _ in range(2))
    assert first == second and pool._world == 2
    with pytest.raises(RankFailed):
        pool.run(misbehave, 1, "raise", world=2)
    assert pool._world == 0
    assert pool.run(group_of_a_mesh, world=2) == first, "new groups have the same names"


def abort_until(marker: str, times: int) -> str:
    if dist.get_rank() == 1 and len(done := Path(marker).read_text()) < times:
        Path(marker).write_text(done + "x")
        os.abort()
    dist.barrier()
    return "fine"


@pytest.mark.long
def test_the_pool_of_the_default_lane_runs_again_once_and_says_so(pool, tmp_path, monkeypatch):
    marker, record = tmp_path / "aborts", tmp_path / "record"
    marker.write_text("")
    monkeypatch.setattr(pool, "repeats", True)
    monkeypatch.setitem(type(pool).run.__globals__, "ABORTS", record)
    with pytest.warns(
        UserWarning, match=f"(?s)run again: rank 1 died, exit code -6.*recorded in {record}"
    ):
        assert pool.run(abort_until, str(marker), 1, world=2) == ["fine"] * 2
    assert "test_the_pool_of_the_default_lane_runs_again_once_and_says_so" in record.read_text()
    assert (
        "Fatal Python error: Aborted" in record.read_text()
        and "in abort_until" in record.read_text()
    )
    marker.write_text("")
    with (
        pytest.warns(UserWarning, match="run again: rank 1 died, exit code -6"),
        pytest.raises(RankFailed, match="rank 1 died, exit code -6"),
    ):
        pool.run(abort_until, str(marker), 2, world=2)


def die_after_a_peer_raised() -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        raise ValueError("connection closed by peer")
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_dead_rank_is_named_where_another_was_heard_first():
    small = Pool(2)
    try:
        with pytest.raises(
            RankFailed, match="(?s)^rank 1 died, exit code -9\nrank 0 of 2 raised.*closed by peer"
        ):
            small.run(die_after_a_peer_raised, world=2)
    finally:
        small.close()


def test_dead_and_late_ranks_are_named_and_the_pool_recovers(tmp_path):
    log = tmp_path / "stderr.log"
    log.touch()
    small = Pool(2, log=str(log))
    try:
        with pytest.raises(RankFailed, match="rank 1 died, exit code -9"):
            small.run(misbehave, 1, "die", world=2)
        assert small.run(total) == [3.0] * 2, "in new processes"
        with pytest.raises(
            RankFailed, match="(?s)no answer within 2 s from rank .*1.*in misbehave"
        ):
            small.run(misbehave, 1, "sleep", world=2, timeout=2)
        assert small.run(total) == [3.0] * 2
        assert log.read_text() == "about to die\nabout to sleep\n", (
            "what a rank prints to its stderr"
        )
    finally:
        small.close()


@pytest.mark.long
def test_the_pool_of_the_long_lane_fails_at_the_first_abort_and_records_it(
    pool, tmp_path, monkeypatch
):
    marker, record = tmp_path / "aborts", tmp_path / "record"
    marker.write_text("")
    monkeypatch.setitem(type(pool).run.__globals__, "ABORTS", record)
    assert not pool.repeats, "this test runs in the long lane, or because it was named"
    with pytest.raises(RankFailed, match="rank 1 died, exit code -6"):
        pool.run(abort_until, str(marker), 1, world=2)
    assert record.read_text().count("abort of a rank:") == 1


def test_a_late_rank_that_has_not_started_is_named(tmp_path):
    """It waits for a reader of its log before it can take work or a signal."""
    os.mkfifo(tmp_path / "log")
    small = Pool(1, log=str(tmp_path / "log"))
    try:
        with pytest.raises(RankFailed, match="(?s)within 1 s from rank 0\nrank 0 has not started"):
            small.run(total, timeout=1)
        assert small._processes == [], "ended"
    finally:
        small.close()


def has_loaded(module: str) -> bool:
    return module in sys.modules


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
