"""A launcher's part: the start of the next attempt, requests to stop, its workers' processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tests.checkpoint.saved import empty_step
from tests.jobs import TINY, job, run_to_end
from tests.launch.nodes import free_port
from tests.messages import says
from tests.runs import left_over
from titanlite.checkpoint import status
from titanlite.config.schema import JobConfig, config_of
from titanlite.errors import CUT_SHORT, GIVEN_UP, STOPPED, RunFailed
from titanlite.fault.board import NoAnswer
from titanlite.fault.decide import Restarts
from titanlite.fault.inspection import RankProcess, inspect, process_state, wait_until
from titanlite.fault.status import Decision, Ended, Failure, Verdict
from titanlite.fault.stop import Stop, time_limit
from titanlite.launch import node as node_module
from titanlite.launch.attempts import (
    Attempt,
    Attempts,
    _keep_logs,
    leaving,
    saved_since,
    shown_here,
)
from titanlite.launch.failure import Exit
from titanlite.launch.node import Node
from titanlite.launch.nodes import Nodes
from titanlite.launch.stopping import EXTRA_SECONDS, Stopped, Stopping
from titanlite.launch.workers import Workers
from titanlite.runtime.cluster import RankInfo
from titanlite.runtime.page import OWN_PAGE, EarlyExit, OwnPage
from titanlite.train.ending import describe_stop

SAVING = [*TINY, "--checkpoint.enable", "--checkpoint.async_mode=disabled", "--training.steps=2"]
QUIET = config_of({"checkpoint.enable": False, "fault.grace_seconds": 60})
"""Without checkpoints signals are not caught, here those of the tests' own process."""
ASKED = "SIGTERM to the launcher"


def member(**changes: Any) -> Any:
    """Return the part of a node that is asked for: of an attempt, with requests and decisions."""
    values = {"rank": 1, "processes": 2, "attempt": 3, "decision": Decision()}
    return SimpleNamespace(**values | changes)


def test_a_restart_goes_on_from_the_runs_own_checkpoint_whatever_the_first_start_was_told(tmp_path):
    options = [
        "--checkpoint.enable",
        "--checkpoint.load_step=7",
        '--checkpoint.exclude_from_loading=["optimizer"]',
    ]
    given = job([*TINY, *options], world=2).given
    attempts = Attempts(member(), given, tmp_path, lambda attempt, poll: None)  # type: ignore[arg-type]
    first, later = (
        attempts._begin(Decision(3, (0, 1, 2), verdict=before))
        for before in (None, Verdict(None, resumes=True))
    )
    assert (first.number, first.ranks, first.world, first.config) == (3, range(2, 4), 6, given)
    saving = later.config.checkpoint
    assert (saving.load_step, saving.exclude_from_loading) == (-1, [])
    without_node_0 = attempts._begin(Decision(3, (1, 2)))
    assert without_node_0.ranks == range(2), "the ranks move up"


def test_other_nodes_than_node_0_print_only_failures_of_their_own_ranks_and_why_they_end(
    tmp_path, capsys
):
    def printed(node: int, code: int | None, own: range = range(0)) -> str:
        attempts = Attempts(member(rank=node), job(TINY, world=2).given, tmp_path, lambda *_: DONE)
        attempts._report(Verdict(code, "restart 1 of 3", LOST), tmp_path, own)
        return capsys.readouterr().err

    says(printed(0, None, range(1, 2)), "rank 0 on here", "restart 1 of 3")
    says(own := printed(1, None, range(2)), "rank 0 on here")
    assert "restart" not in own and printed(1, None, range(2, 4)) == ""
    (line,) = printed(1, GIVEN_UP).splitlines()
    says(line, "node 0", "SIGKILL")
    attempt = Attempt(1, range(2, 4), 4, job(TINY, world=4).given)
    assert [shown_here(ranks, attempt) for ranks in ({0}, {0, 3}, {9})] == [[], [3], []]
    assert shown_here({9}, replace(attempt, ranks=range(2))) == [0], "which a restart has left"


def test_logs_of_the_last_three_attempts_are_kept_and_a_link_is_not_followed(tmp_path):
    logs, archive = tmp_path / "logs", tmp_path / "archive"
    logs.mkdir()
    archive.mkdir()
    (archive / "rank-0.log").write_text("mine")
    (logs / "attempt-2").symlink_to(archive)
    config = job(TINY, world=2).given
    for number in (1, 3, 4, 5):
        (logs / "rank-0.log").write_text(f"{number}")
        (logs / "rank-1.log").write_text(f"{number}")
        kept = _keep_logs(tmp_path, Attempt(number, range(1), 2, config))
        (logs / "rank-1.log").write_text("the next attempt's, on a spare node")
        _keep_logs(tmp_path, Attempt(number, range(1, 2), 2, config))
        assert (kept / "rank-1.log").read_text() == f"{number}", "the other node is late"
        (logs / "rank-1.log").unlink()
    assert sorted(path.name for path in logs.iterdir()) == [f"attempt-{n}" for n in (2, 3, 4, 5)]
    assert (archive / "rank-0.log").read_text() == "mine"


@pytest.mark.long
def test_what_a_run_found_when_it_started_is_not_what_it_saved(pool, tmp_path):
    config = job([*SAVING, f"--job.dump_folder={tmp_path}"], world=1).config
    fresh = saved_since(config)
    assert (fresh().step, fresh().by_this_run) == (0, False)
    pool.run(run_to_end, SAVING, str(tmp_path), world=1)
    assert (fresh().step, fresh().by_this_run) == (2, True)
    says(fresh().source, f"{tmp_path}/checkpoint/step-2")
    found = saved_since(config)()
    assert (found.step, found.by_this_run) == (2, False)


def test_a_resume_from_a_bucket_has_saved_nothing(tmp_path):
    """So a restart before the first save keeps load_step and exclude_from_loading."""
    bucket = ["--checkpoint.folder=s3://bucket/run", f"--job.dump_folder={tmp_path}"]
    config = job([*SAVING, *bucket], world=1).config
    status.note(config, 2)  # as a launcher does that has looked there
    saved = saved_since(config)
    for step in (2, 1):
        status.note(config, step)  # as a resume or a rewind does
        assert (saved().step, saved().by_this_run) == (step, False)
    status.record(config, tmp_path / "bucket", 3)
    assert (saved().step, saved().by_this_run) == (3, True)


# ---------------------------------------------------------------- nodes


class Together:
    """Two launchers in threads of this process, with a real store between them."""

    def __init__(self, folder: Path, **values: Any) -> None:
        config = config_of({"job.dump_folder": str(folder), "fault.rejoin_seconds": 30, **values})
        port = int(free_port())
        self.threads = ThreadPoolExecutor(8)
        for number in range(2):
            (folder / f"{number}").mkdir(parents=True)
        self.asked = ["", ""]

        def make(number: int) -> Node:
            here, restarts = Nodes(2, number, "127.0.0.1", port, ""), Restarts(3)
            return Node(here, 1, config, folder / f"{number}", restarts, lambda: self.asked[number])

        self.nodes: list[Node] = self.all(lambda: make(0), lambda: make(1))

    def all(self, *calls: Callable[[], Any]) -> list[Any]:
        """Return the results of calls at the same time."""
        return [each.result(60) for each in [self.threads.submit(call) for call in calls]]

    def meet(self) -> list[Decision]:
        return self.all(*(node.meet for node in self.nodes))

    def settle(self, *ends: Ended) -> list[Verdict]:
        """Return each node's verdict on an attempt that has ended so."""
        both = zip(self.nodes, ends, strict=True)
        return self.all(*(partial(node.settle, ended) for node, ended in both))

    def leave(self, number: int, error: BaseException, **last: Any) -> None:
        """Let a launcher leave by an error, after it has put something on the board."""
        node = self.nodes[number]
        with suppress(type(error)), leaving(node):
            node._board.put(**last)
            raise error


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., Together]]:
    """Return a function that starts an attempt of two launchers, which must end: their boards go on
    each half a second, and a pytest process would end with them.
    """
    started: list[Node] = []

    def begin(**values: Any) -> Together:
        together = Together(tmp_path, **values)
        started.extend(together.nodes)
        assert [decision.members for decision in together.meet()] == [(0, 1), (0, 1)]
        return together

    yield begin
    for node in reversed(started):  # node 0's is the last: it has the store
        node._end_board()


DONE = Ended()
LOST = Failure(0, "here", 5.0, 7, "exited without a traceback (SIGKILL)", "", known=False)
FOLLOWED, FAILED = Ended(over=True), Ended(LOST, over=True)
TWICE = EarlyExit(CUT_SHORT, 6, f"{ASKED}; second signal: SIGTERM", 6)


def test_a_request_that_comes_while_workers_end_after_a_failure_is_in_the_verdict(start):
    together = start()
    together.asked[1] = ASKED
    for verdict in together.settle(FOLLOWED, FAILED):
        assert verdict.early == EarlyExit(CUT_SHORT, 6, ASKED, 6), "no restart, which begins first"


@pytest.mark.parametrize("asked", [0, 1])
def test_a_request_while_nodes_meet_for_a_restart_ends_the_run_on_all(start, asked):
    together = start()
    assert [verdict.code for verdict in together.settle(FOLLOWED, FAILED)] == [None, None]
    together.asked[asked] = ASKED
    for found in together.meet():
        assert found.is_final and found.verdict.early == EarlyExit(CUT_SHORT, 6, ASKED, 6)


def test_launchers_say_for_whom_they_wait_and_how_long(start, monkeypatch, capsys):
    together = start()
    first, second = together.nodes
    together.settle(FOLLOWED, FAILED)
    monkeypatch.setattr(node_module, "SAY_SECONDS", 0.0)
    meeting = together.threads.submit(first.meet)
    assert is_said("waiting for NODE_RANK 1, at most 30 s (fault.rejoin_seconds)", capsys)
    with monkeypatch.context() as cut:
        cut.setattr(second._board, "exchange", Mock(side_effect=NoAnswer("x")))
        wait_until(lambda: second._board.problem, 10)
        late = together.threads.submit(second.meet)
        assert is_said(f"waiting for node 0 at 127.0.0.1:{first.address[1]}", capsys)
    assert meeting.result(60).members == late.result(60).members == (0, 1)


def is_said(words: str, capsys: pytest.CaptureFixture[str]) -> bool:
    """Wait until something is printed."""
    return any(words in capsys.readouterr().out or time.sleep(0.05) for _ in range(200))


def test_a_spare_node_that_looked_at_no_rank_in_a_hang_looks_at_its_own_in_the_next(
    start, monkeypatch
):
    together = start()
    second = together.nodes[1]
    wait = second._wait

    def wait_through_a_hang(*condition):
        decision = wait(*condition)
        second._board.put(found={})
        return decision

    together.settle(FOLLOWED, FAILED)
    monkeypatch.setattr(second, "_wait", wait_through_a_hang)
    assert [decision.members for decision in together.meet()] == [(0, 1), (0, 1)]
    assert second._board.own.found is None


def test_a_second_signal_to_a_launcher_does_not_end_ranks_of_other_nodes_that_still_save(start):
    together = start()
    saved = EarlyExit(STOPPED, 7, ASKED, 0)
    together.leave(1, Stopped(TWICE), stop=ASKED, ended=Ended(early=saved))
    first = together.nodes[0]
    first.poll()
    verdict = first.settle(Ended(early=saved))
    assert (verdict.code, verdict.early) == (STOPPED, saved)


def test_a_second_signal_after_a_failure_ends_all_nodes_with_one_code(start):
    together = start()
    together.leave(1, Stopped(TWICE))
    verdict = together.nodes[0].settle(FOLLOWED)
    assert (verdict.code, verdict.early) == (CUT_SHORT, TWICE)


def test_the_reason_of_node_0_why_it_cannot_prepare_reaches_the_others(start):
    together = start()
    waiting = together.threads.submit(together.nodes[1].prepare, Decision(members=(0, 1)))
    together.leave(0, OSError(28, "no space left"))
    decision = waiting.result(20)
    assert decision.is_final
    says(decision.verdict.why, "node 0: ", "no space")


def test_an_attempt_that_fails_while_nodes_prepare_is_begun_and_ended(start):
    """Its decision may be a newer one by then, which has no members yet."""
    first, second = start().nodes
    decision = first.decision
    second._board.put(ended=FAILED)
    first._board.put(ended=FOLLOWED)
    wait_until(lambda: first.decision.attempt == 2, 10)
    assert first.prepare(decision).members == (0, 1)
    with pytest.raises(RunFailed):
        first.poll()


def test_other_nodes_do_not_wait_for_node_0_to_prepare_longer_than_the_start_may_take(start):
    """And node 0 learns why they end."""
    together = start(**{"comm.init_timeout_seconds": 2})
    first, second = together.nodes

    def wait() -> None:
        with leaving(second):
            second.prepare(Decision(members=(0, 1)))

    waiting = together.threads.submit(wait)
    first._board.put(ended=FOLLOWED)
    wait_until(lambda: first.decision.is_final, 10)
    assert first.decision.verdict
    says(first.decision.verdict.failure.text, "node 0", "2 s (comm.init_timeout_seconds)")
    first._board.put(left=True)
    with pytest.raises(TimeoutError, match="2 s"):
        waiting.result(60)


def test_the_keys_of_an_attempt_that_is_over_are_deleted_while_the_next_one_runs(start):
    together = start()
    first = together.nodes[0]
    for key in (f"attempt-{number}/{key}" for number in (1, 10) for key in range(700)):
        first._store.set(key, "")
    together.settle(FOLLOWED, FAILED)
    together.meet()

    def left() -> list[str]:
        first.poll()
        return [key for key in first._store.list_keys() if key.startswith("attempt")]

    assert len(left()) == 700 + 200, "some at each poll"
    after = left()
    assert len(after) == 700 and all(key.startswith("attempt-10/") for key in after)
    assert first._store.check(["decision", "status/1", "run"])


# ---------------------------------------------------------------- a request to stop


def test_the_first_signal_after_the_workers_is_a_request_and_the_second_ends_at_once(
    tmp_path, monkeypatch
):
    older = "titanlite.launch.stopping.newest_step"
    monkeypatch.setattr(older, lambda folder: 12)  # of a run that saved; this one does not
    request = stopping(tmp_path)
    page(tmp_path, 0, completed=6)
    request.finish()
    (tmp_path / "0.page").unlink()
    for _ in range(2):
        request._catch(signal.SIGTERM, None)
        assert request.reason == ASKED, "the second came at the same time: another sender's"
    request._signaled_at -= 60
    for _ in range(2):
        with pytest.raises(Stopped) as caught:
            request._catch(signal.SIGTERM, None)
        assert caught.value.early == TWICE, "a third one adds no words"
    of_others = stopping(tmp_path, "SIGUSR1 to rank 1", seconds_ago=60)
    of_others._catch(signal.SIGTERM, None)
    assert of_others.reason == "SIGUSR1 to rank 1", "its first, as a scheduler ends node by node"


def stopping(private: Path, reason: str = "", seconds_ago: float = 0.0) -> Stopping:
    request = Stopping(QUIET)
    request.begin(private)
    request.reason, request._asked_at = reason, time.monotonic() - seconds_ago
    return request


def page(private: Path, rank: int, **values: Any) -> OwnPage:
    """Return the page of a rank that has written it."""
    written = OwnPage()
    written.share(private / f"{rank}.page")
    written.pid = 0
    for name, value in values.items():
        setattr(written, name, value)
    written.enter("forward")
    return written


@pytest.mark.parametrize("by_rank", [False, True])
def test_a_request_to_a_launcher_or_a_rank_reaches_all_nodes_and_stays(start, tmp_path, by_rank):
    together = start()
    if by_rank:
        page(tmp_path / "1", 1).beat(ASKED)
    else:
        together.asked[1] = ASKED
    first, second = together.nodes
    wait_until(lambda: first.decision.stop == second.decision.stop == ASKED, 10)
    (tmp_path / "1" / "1.page").unlink(missing_ok=True)
    together.asked[1] = ""
    wait_until(lambda: second._board.own.stop == ASKED, 5)
    assert first.decision.stop == second._board.own.stop == ASKED


def test_ranks_are_killed_when_the_grace_is_over_and_not_before(tmp_path):
    late = 60 + EXTRA_SECONDS
    stopping(tmp_path, "Ctrl-C", late - 1).poll(member())
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    page(tmp_path, 1, completed=6, pid=child.pid)
    with pytest.raises(Stopped) as caught:
        stopping(tmp_path, "Ctrl-C", late + 1).poll(member())
    early = caught.value.early
    assert (early.code, early.step, early.lost) == (CUT_SHORT, 6, 6)
    says(early.reason, "Ctrl-C; fault.grace_seconds = 60")
    assert child.wait(10) == -signal.SIGKILL


SAVED = EarlyExit(STOPPED, 7, "SIGTERM to rank 0", 0)
LEFT_BEHIND = EarlyExit(CUT_SHORT, 6, "SIGTERM to rank 0; another rank had left", 2)


def test_a_launcher_that_started_no_worker_claims_no_step_and_no_save_of_an_earlier_run(tmp_path):
    saved = tmp_path / "checkpoint/step-20"
    empty_step(saved, 20)
    config = config_of({"checkpoint.enable": True, "job.dump_folder": str(tmp_path)})
    request = Stopping(QUIET)
    request._config, request.reason = config, ASKED
    early = request._early()
    told = describe_stop(config, early)
    says(told, ASKED, "nothing was trained", saved)
    assert early.code == STOPPED and "at step" not in told and "saved:" not in told
    page(tmp_path, 0, completed=20)
    request.begin(tmp_path)
    says(describe_stop(config, request._early()), "at step 20", f"saved: {saved}")


def test_ranks_are_ended_when_one_had_to_leave_without_saving(tmp_path):
    page(tmp_path, 0, ending=SAVED)
    stopping(tmp_path, "Ctrl-C").poll(member())
    page(tmp_path, 1, ending=LEFT_BEHIND)
    with pytest.raises(Stopped):
        stopping(tmp_path, "Ctrl-C").poll(member())


def test_the_rank_that_knows_best_says_how_a_run_ended(tmp_path):
    request = stopping(tmp_path)
    assert request.ended({0: Exit(1, 5.0), 1: Exit(-9, 5.0, ended=True)}) is None
    page(tmp_path, 0, ending=LEFT_BEHIND)
    page(tmp_path, 1, ending=TWICE)
    assert request.ended({}) == Ended(early=TWICE, over=True)
    page(tmp_path, 2, ending=SAVED)
    assert request.ended({0: Exit(1, 5.0)}) == Ended(early=SAVED)


def test_ranks_that_a_signal_ended_before_they_could_catch_it_end_those_of_other_nodes(tmp_path):
    request = stopping(tmp_path)
    request._config = config_of({"checkpoint.enable": True, "job.dump_folder": str(tmp_path)})
    killed, raised = Exit(-9, 5.0, ended=True), Exit(1, 5.0)
    ended = request.ended({0: Exit(-signal.SIGTERM, 5.0), 1: killed})
    assert ended and ended.over and ended.early
    assert (ended.early.code, ended.early.step) == (STOPPED, 0)
    says(ended.early.reason, "SIGTERM", "starting")
    assert request.ended({0: Exit(-signal.SIGTERM, 5.0), 1: raised}) is None


def rank_asked(seconds_ago: float, **fault: int) -> Stop:
    config = config_of({f"fault.{key}": value for key, value in fault.items()})
    request = Stop(config, RankInfo(0, 1, 0, "here"), {})
    request.ask(ASKED)
    request._asked_at = time.monotonic() - seconds_ago
    return request


@pytest.mark.parametrize(
    ("phase", "asked", "since", "why"),
    [
        ("forward", 59, 59, ""),
        ("forward", 61, 61, "fault.grace_seconds = 60"),
        ("data", 29, 59, ""),
        ("data", 59, 29, ""),
        ("data", 31, 31, "half of fault.grace_seconds = 60"),
        ("backward", 31, 31, ""),
    ],
)
def test_a_rank_leaves_when_its_grace_is_over_and_without_data_at_half_of_it(
    monkeypatch, phase, asked, since, why
):
    now = time.monotonic()
    monkeypatch.setattr(OWN_PAGE, "phase", phase)
    monkeypatch.setattr(OWN_PAGE, "since", now - since)
    overdue = rank_asked(asked, grace_seconds=60).overdue(now)
    says(overdue, why)
    assert bool(overdue) == bool(why)


def test_the_time_limit_leaves_the_grace_for_the_save():
    config = config_of({"fault.stop_after_minutes": 10, "fault.grace_seconds": 90})
    limit, name = time_limit(config, {})
    assert limit == pytest.approx(time.time() + 600 - 90, abs=5)
    assert name == "fault.stop_after_minutes = 10"
    end = int(time.time()) + 300
    limit, name = time_limit(config, {"SLURM_JOB_END_TIME": str(end)})
    assert limit == end - 90 and "SLURM" in name
    assert time_limit(JobConfig(), {})[1] == ""


def test_the_step_that_runs_is_not_lost(monkeypatch):
    for name, value in (("step", 8), ("completed", 7), ("saved", 7)):
        monkeypatch.setattr(OWN_PAGE, name, value)
    assert rank_asked(1).left() == EarlyExit(STOPPED, 7, ASKED, 0)
    monkeypatch.setattr(OWN_PAGE, "saved", 4)
    assert rank_asked(1).left("x") == EarlyExit(CUT_SHORT, 7, f"{ASKED}; x", 3)


# ---------------------------------------------------------------- processes

DUMPS = (
    "import faulthandler, signal, sys, time; "
    "faulthandler.register(signal.SIGUSR2, open(sys.argv[1], 'w'))"
)


def test_a_stopped_process_gives_its_stack_and_stays_stopped(tmp_path):
    stack = tmp_path / "stack"
    child = subprocess.Popen(
        [sys.executable, "-c", f"{DUMPS}; print(flush=True); time.sleep(60)", stack], stdout=-1
    )
    assert child.stdout
    child.stdout.readline()
    child.send_signal(signal.SIGSTOP)
    wait_until(lambda: process_state(child.pid) == "stopped", 10)
    found = inspect({0: RankProcess(child.pid, stack)})
    assert found[0].state == "stopped" and "line 1 in <module>" in found[0].stack
    wait_until(lambda: process_state(child.pid) == "stopped", 2)
    assert process_state(child.pid) == "stopped"
    child.kill()
    child.wait()


FORKS = """
import os, pathlib, sys, time
pid = os.fork()
if pid == 0:
    time.sleep(60)
pathlib.Path(sys.argv[1]).write_text(str(pid))
sys.exit(3)
"""


def test_what_workers_have_forked_ends_with_them(tmp_path):
    (tmp_path / "forks.py").write_text(FORKS)
    address, environ = ("localhost", 1), {"PYTHONPATH": str(tmp_path)}
    private = tmp_path / "private"
    private.mkdir()
    argv = [str(tmp_path / "child")]
    workers = Workers(argv, "", range(1), 1, address, tmp_path, private, environ, module="forks")
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    exits, reason = workers.run(lambda: None)
    for number, handler in handlers.items():
        if signal.getsignal(number) != handler:
            signal.signal(number, handler)
    assert exits[0].code == 3 and reason is None
    child = int((tmp_path / "child").read_text())
    assert left_over([child]) == [] and os.getpid() != child
