"""A run that hangs is ended, and one report names the rank to blame, its host, phase and stack."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from socket import gethostname
from typing import Any

import pytest

from tests.jobs import TINY
from tests.lanes import sample
from tests.launch.nodes import outputs, rendezvous, start_nodes, start_tasks
from tests.messages import says
from tests.runs import finish, run
from titanlite.errors import FAILED
from titanlite.fault.stall import (
    ENDED,
    IN_KERNEL,
    PAUSED,
    Hang,
    Judge,
    Standing,
    culprits,
    report,
)
from titanlite.fault.status import Beat, Inspection

LIMIT, START = 10.0, (300.0, "comm.init_timeout_seconds")
STILL = Beat(5, "backward", 40, 0.0, LIMIT, "comm.train_timeout_seconds", 4711, "node07")
WAITING = """Thread 0x01 (most recent call first):
  <no Python frame>

Thread 0x02 (most recent call first):
  File "/home/me/titanlite/fault/beat.py", line 12 in run

Current thread 0x03 (most recent call first):
  File "/home/me/.venv/lib/python3.11/site-packages/torch/_ops.py", line 1317 in __call__
  File "/home/me/.venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line \
5170 in all_gather
  File "/home/me/titanlite/train/step.py", line 87 in _forward_backward
"""
WAITING_FOR_GPU = """Thread 0x01 (most recent call first):
  File "/home/me/.venv/lib/python3.11/site-packages/torch/cuda/streams.py", line 254 in synchronize
  File "/home/me/titanlite/train/guard.py", line 19 in read
"""
READING_SIZES = """Thread 0x01 (most recent call first):
  File "/home/me/titanlite/parallel/expert_parallel.py", line 101 in _dispatch
"""
ELSEWHERE = 'Thread 0x01 (most recent call first):\n  File "/home/me/model.py", line 7 in look_up\n'
SPIED = (
    'Process 1: python\nPython v3.11.7\n\nThread 12 (idle): "MainThread"\n'
    "    look_up (/home/me/model.py:7)\n"
)


def judge(world: int) -> Judge:
    return Judge(world, 1.0, START, now=0.0)


def watch(run: Judge, seconds: int, beats: dict[int, Beat], first: int = 1) -> list[int]:
    """Look once a second while ranks beat but do not move; return the seconds at which the run
    counted as hung.
    """
    looks = [
        {rank: replace(beat, seconds=t) for rank, beat in beats.items()} for t in range(seconds)
    ]
    return [first + t for t, beats in enumerate(looks) if run.look(beats, float(first + t))]


def hang(*ranks: dict[str, Any]) -> Hang:
    """Return the hang of ranks as they were found: a beat, its age, and an inspection."""
    standings = []
    for rank, found in enumerate(ranks):
        values: dict[str, Any] = {"beat": STILL, "age": 0.5, **found}
        beat, age = values.pop("beat"), values.pop("age")
        standings.append(Standing(rank, beat, age, Inspection(**values)))
    return Hang(LIMIT, "comm.train_timeout_seconds", 1.0, tuple(standings))


def test_a_run_hangs_when_no_rank_moved_for_the_limit():
    run = judge(2)
    assert watch(run, 8, {0: STILL, 1: STILL}) == []
    assert watch(run, 5, {0: replace(STILL, sequence=41), 1: STILL}, first=9) == [], "rank 0 moved"
    assert watch(run, 7, {0: replace(STILL, sequence=41), 1: STILL}, first=14) == [19, 20]


def test_the_slowest_phase_that_a_rank_is_in_has_the_limit():
    run, saving = (
        judge(2),
        replace(STILL, phase="save", limit=30.0, key="comm.checkpoint_timeout_seconds"),
    )
    assert watch(run, 33, {0: STILL, 1: saving}) == [31, 32, 33]


def test_what_a_silent_rank_told_last_gives_it_no_more_time():
    run, first_step = judge(2), replace(STILL, step=1, limit=300.0)
    assert watch(run, 1, {0: STILL, 1: first_step}) == []
    assert watch(run, 12, {0: STILL}, first=2) == [11, 12, 13]
    assert watch(judge(1), 20, {0: first_step}) == [], "unless nobody else is there"


def test_a_rank_without_a_heartbeat_has_the_time_of_the_others_or_else_of_the_start():
    """Others that train have met it: it may have stopped before its first heartbeat."""
    assert watch(judge(2), 302, {})[:1] == [300]
    starts = replace(STILL, step=0, phase="start", limit=300.0)
    assert watch(judge(2), 302, {0: starts})[:1] == [301], "the other one beat at second 1"
    assert watch(judge(2), 302, {0: STILL})[:1] == [11]


def test_a_rank_that_has_ended_is_waited_for_by_nobody():
    run, ended = judge(2), replace(STILL, phase=ENDED)
    assert watch(run, 8, {0: STILL, 1: ended}) == []
    assert watch(run, 20, {0: replace(STILL, sequence=41), 1: ended}, first=9)[:1] == [19]
    assert watch(run, 50, {0: ended, 1: ended}, first=29) == []


def test_a_watcher_that_was_stopped_itself_does_not_count_that_time():
    run = judge(1)
    assert watch(run, 3, {0: STILL}) == []
    assert watch(run, 3, {0: STILL}, first=1000) == []


AT_WORK: dict[str, Any] = {}
BEHIND = {"beat": replace(STILL, sequence=3)}
SILENT = {"age": 9}
WAITS, COMPUTES, SEEN = {"stack": WAITING}, {"stack": ELSEWHERE}, {"stack": SPIED}
ASLEEP = {"state": "sleeping"}
WAITS_FOR_GPU, READS_SIZES = {"stack": WAITING_FOR_GPU}, {"stack": READING_SIZES}


@pytest.mark.parametrize(
    ("blamed", "ranks"),
    [
        (1, [AT_WORK, {"state": PAUSED}, SILENT]),
        (1, [WAITS_FOR_GPU | ASLEEP, {"state": IN_KERNEL}]),
        (1, [WAITS_FOR_GPU | ASLEEP, ASLEEP]),
        (1, [WAITS_FOR_GPU, COMPUTES]),
        (1, [READS_SIZES, COMPUTES]),
        (None, [WAITS_FOR_GPU, WAITS]),
        (1, [AT_WORK, {"beat": None, "age": 300}]),
        (2, [BEHIND, AT_WORK, SILENT]),
        (1, [AT_WORK, BEHIND, AT_WORK]),
        (0, [{"beat": replace(STILL, step=4, sequence=99)}, AT_WORK]),
        (1, [WAITS, COMPUTES, WAITS]),
        (1, [WAITS, SEEN, AT_WORK]),
        (0, [COMPUTES, BEHIND | WAITS]),
        (1, [COMPUTES, BEHIND | SEEN]),
        (None, [COMPUTES, COMPUTES]),
        (None, [WAITS, WAITS]),
        (0, [COMPUTES]),
    ],
)
def test_the_rank_to_blame(blamed, ranks):
    """Stopped, else in the kernel or without a stack or a beat, else behind, else not in a
    collective, else none.
    """
    guilty, _ = culprits(hang(*ranks))
    assert [each.rank for each in guilty] == ([] if blamed is None else [blamed])


def test_the_report_is_short_on_thousands_of_ranks_and_has_each_stack_once():
    found = hang({"state": PAUSED} | COMPUTES, *[WAITS] * 4095)
    first, culprit, stack, others = report(found).splitlines()
    says(first, "10 s", "comm.train_timeout_seconds", "rank 0: stopped")
    says(culprit, "rank 0", "node07", "backward of step 5", "pid 4711")
    says(stack, "/home/me/model.py:7 in look_up")
    says(others, "ranks 1, 2, 3", "4087 more", "torch/_ops.py:1317 in __call__")
    whole = report(found, whole=True)
    assert whole.count("beat.py:12 in run") == 1 and whole.count("all_gather") == 1


# ---------------------------------------------------------------- through the launcher

HANGS = [
    *TINY,
    "--model.package=injured",
    "--training.steps=100000",
    "--metrics.log_freq=1000",
    "--fault.stall_seconds=3",
    "--comm.init_timeout_seconds=60",
]
STALLED = "the run hangs: "


def hung(folder: Path, injury: str, *argv: str, code: int = FAILED, **environ: str) -> str:
    """Return what a run of two ranks prints from the report of its hang on."""
    out = run([*HANGS, *argv], folder, 2, code, INJURY=injury, **environ).out
    assert "Traceback" not in out and "failed first" not in out, out
    return out.partition(STALLED)[2]


@pytest.mark.parametrize(
    ("injury", "limit", "says_why"),
    sample(
        rows := [
            ("stop:backward:1:5", 3, "stopped"),
            ("sleep:backward:1:5", 3, "not in a collective"),
            ("spin:backward:1:5", 8, "no heartbeat for "),
            ("sleep:data:0:5", 3, "behind"),
        ],
        rows[0],
    ),
)
def test_the_report_is_last_and_names_rank_host_phase_and_stack(tmp_path, injury, limit, says_why):
    last = hung(tmp_path, injury, f"--fault.stall_seconds={limit}")
    kind, phase, rank, _ = injury.split(":")
    says(last.splitlines()[0], f"{limit} s (fault.stall_seconds)", f"rank {rank}: {says_why}")
    phase = r"\w+" if kind == "spin" else phase  # it could not tell any more
    assert re.search(rf"\nrank {rank} on {gethostname()}: {phase} of step 5 ", last), last
    file = tmp_path / "logs/hang-1.txt"
    assert last.strip().endswith(str(file))
    assert " in suffer\n" in last and " in suffer\n" in file.read_text()


@pytest.mark.nightly
def test_a_hang_in_validation_is_reported_before_its_collectives_give_up(tmp_path):
    """It may take as long as a start, which compiles; they would wait 15 s more than a step."""
    argv = ["--validation.enable", "--validation.freq=5", "--validation.steps=2"]
    argv += ["--comm.train_timeout_seconds=5", "--comm.init_timeout_seconds=40"]
    last = hung(tmp_path, "stop:validation:1:5", *argv)
    says(last, "for 40 s", "rank 1: stopped\n")
    assert "Timed out" not in last


@pytest.mark.long
def test_a_rank_that_dies_when_it_is_asked_for_its_stack_does_not_hide_the_hang(tmp_path):
    last = hung(tmp_path, "deaf:backward:1:5")
    says(last, "for 3 s", "rank 1: ")
    assert "SIGUSR2" not in last


@pytest.mark.long
def test_a_rank_that_never_connects_is_named(tmp_path):
    last = hung(tmp_path, "stop:start:1:0", "--comm.init_timeout_seconds=25")
    says(
        last, "25 s (comm.init_timeout_seconds)", "rank 1: stopped\n", "\nrank 1: before its first"
    )
    says(last, " in suffer\n")


@pytest.mark.long
def test_a_run_with_checkpoints_that_hung_starts_again(tmp_path):
    argv = ["--checkpoint.enable", "--checkpoint.async_mode=disabled", "--checkpoint.interval=2"]
    last = hung(tmp_path, "sleep:backward:1:6", *argv, "--training.steps=8", code=0)
    says(last.splitlines()[0], "(fault.stall_seconds)", "rank 1: ")
    stack, restart, resumed = map(last.index, (" in suffer\n", "restart 1 of 3", "resumed step 4"))
    assert stack < restart < resumed and (tmp_path / "logs/hang-1.txt").exists()


@pytest.mark.long
def test_a_culprit_on_another_node_is_asked_by_its_launcher_and_is_the_failure_that_is_told(
    tmp_path,
):
    """The other rank fails too, when the culprit is killed."""
    nodes = start_nodes(HANGS, tmp_path, INJURY="stop:backward:1:5")
    first, second = outputs(nodes, FAILED)
    says(first.partition(STALLED)[2], "rank 1: stopped\n", " in suffer\n")
    says(second, "rank 1: stopped")
    assert "failed first" not in first + second


@pytest.mark.long
def test_a_rank_that_hangs_at_the_end_is_ended_though_node_0_is_done(tmp_path):
    nodes = start_nodes([*HANGS, "--training.steps=3"], tmp_path, INJURY="sleep:end:1:0")
    first, second = outputs(nodes, FAILED)
    says(first, STALLED, "rank 1 on ", "end of step 3", " in suffer\n")
    says(second, "node 0", STALLED)


@pytest.mark.long
def test_without_the_launcher_rank_0_judges_and_every_rank_dumps_its_stack(tmp_path):
    injury = {"INJURY": "sleep:backward:1:5"}
    ends = [*map(finish, start_tasks(HANGS, tmp_path, **rendezvous(), **injury))]
    assert all(code for code, _ in ends), ends
    out = ends[0][1]
    says(out, "3 s (fault.stall_seconds)", "rank 1: not in a collective", " in suffer\n")
    assert "all_gather" in (tmp_path / "logs" / "rank-0.stack").read_text()
