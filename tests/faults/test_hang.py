"""A run that hangs is ended, and one report names the rank to blame, its host, phase and stack."""

import re
import socket
from dataclasses import replace

import pytest

from tests.jobs import TINY
from tests.lanes import sample
from tests.launch.test_nodes import free_port, node
from tests.runs import finish, start
from titanlite.fault.stall import (
    ENDED,
    IN_KERNEL,
    STOPPED,
    Hang,
    Judge,
    Standing,
    culprits,
    in_collective,
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
  File "/home/me/titanlite/train/late_copy.py", line 19 in read
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


def standing(rank: int, beat: Beat | None = STILL, age: float = 0.5, **found: str) -> Standing:
    return Standing(rank, beat, age, Inspection(**found))


def hang(*ranks: Standing) -> Hang:
    return Hang(LIMIT, "comm.train_timeout_seconds", 1.0, ranks)


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
    assert culprits(hang(standing(0), standing(1, None, age=300)))[0][0].rank == 1


def test_a_rank_that_has_ended_is_waited_for_by_nobody():
    run, ended = judge(2), replace(STILL, phase=ENDED)
    assert watch(run, 8, {0: STILL, 1: ended}) == []
    assert watch(run, 20, {0: replace(STILL, sequence=41), 1: ended}, first=9)[:1] == [19]
    assert watch(run, 50, {0: ended, 1: ended}, first=29) == []


def test_a_watcher_that_was_stopped_itself_does_not_count_that_time():
    run = judge(1)
    assert watch(run, 3, {0: STILL}) == []
    assert watch(run, 3, {0: STILL}, first=1000) == []


@pytest.mark.parametrize(
    ("ranks", "blamed"),
    [
        ([standing(0), standing(1, state=STOPPED), standing(2, age=9)], [1]),
        ([standing(0, stack=WAITING_FOR_GPU, state="sleeping"), standing(1, state=IN_KERNEL)], [1]),
        (
            [standing(0, stack=WAITING_FOR_GPU, state="sleeping"), standing(1, state="sleeping")],
            [1],
        ),
        ([standing(0, stack=WAITING_FOR_GPU), standing(1, stack=ELSEWHERE)], [1]),
        ([standing(0, stack=WAITING_FOR_GPU), standing(1, stack=WAITING)], []),
        ([standing(0, replace(STILL, sequence=3)), standing(1), standing(2, age=9)], [2]),
        ([standing(0), standing(1, replace(STILL, sequence=3)), standing(2)], [1]),
        ([standing(0, replace(STILL, step=4, sequence=99)), standing(1)], [0]),
        (
            [standing(0, stack=WAITING), standing(1, stack=ELSEWHERE), standing(2, stack=WAITING)],
            [1],
        ),
        ([standing(0, stack=WAITING), standing(1, stack=SPIED), standing(2)], [1]),
        (
            [standing(0, stack=ELSEWHERE), standing(1, replace(STILL, sequence=3), stack=WAITING)],
            [0],
        ),
        ([standing(0, stack=ELSEWHERE), standing(1, replace(STILL, sequence=3), stack=SPIED)], [1]),
        ([standing(0, stack=ELSEWHERE), standing(1, stack=ELSEWHERE)], []),
        ([standing(0, stack=WAITING), standing(1, stack=WAITING)], []),
        ([standing(0, stack=ELSEWHERE)], [0]),
    ],
)
def test_the_rank_to_blame(ranks, blamed):
    """Stopped, else in the kernel or without a stack or a beat, else behind, else not in a
    collective, else none.
    """
    assert [each.rank for each in culprits(hang(*ranks))[0]] == blamed


def test_what_the_main_thread_waits_in_decides():
    assert (
        in_collective(WAITING)
        and in_collective(WAITING_FOR_GPU)
        and in_collective(READING_SIZES)
        and not in_collective(ELSEWHERE)
        and not in_collective(SPIED)
        and not in_collective("")
    )


def test_the_report_is_short_on_thousands_of_ranks_and_has_each_stack_once():
    others = [standing(rank, stack=WAITING) for rank in range(1, 4096)]
    text = report(hang(standing(0, state=STOPPED, stack=ELSEWHERE), *others))
    assert text.splitlines() == [
        "the run hangs: no rank moved for 10 s (comm.train_timeout_seconds). rank 0: stopped",
        "rank 0 on node07: backward of step 5 for 0 s, stopped, last beat 0 s ago, pid 4711",
        "    /home/me/model.py:7 in look_up",
        "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 4087 more: backward of step 5, "
        "in torch/_ops.py:1317 in __call__",
    ]
    whole = report(hang(standing(0, stack=ELSEWHERE), *others), whole=True)
    assert whole.count("beat.py:12 in run") == 1 and whole.count("all_gather") == 1


# ---------------------------------------------------------------- through the launcher

HANGS = [*TINY, "--model.package=injured", "--training.steps=100000", "--metrics.log_freq=1000"]


def injure(folder, fault: str, stall: int, *argv: str, **environ: str):
    limits = f"--fault.stall_seconds={stall}", "--comm.init_timeout_seconds=60"
    return start([*HANGS, *limits, *argv], folder, **{"NGPU": "2", "INJURY": fault, **environ})


@pytest.mark.parametrize(
    ("fault", "stall", "says"),
    sample(
        [
            ("stop:backward:1:5", 3, "rank 1: stopped"),
            ("sleep:backward:1:5", 3, "rank 1: not in a collective, where the others wait"),
            ("spin:backward:1:5", 8, r"rank 1: no heartbeat for \d+ s"),
            ("stop:data:0:5", 3, "rank 0: stopped"),
            ("sleep:data:0:5", 3, "rank 0: behind the others"),
        ],
        ("stop:backward:1:5", 3, "rank 1: stopped"),
        long=[],
    ),
)
def test_the_report_is_last_and_names_rank_host_phase_and_stack(tmp_path, fault, stall, says):
    kind, phase, rank, _ = fault.split(":")
    process = injure(tmp_path, fault, stall)
    code, out = finish(process)
    last = out.partition("titanlite: the run hangs: ")[2]
    assert code == 1 and re.match(
        rf"no rank moved for {stall} s \(fault.stall_seconds\). {says}\n", last
    ), out
    phase = r"\w+" if kind == "spin" else phase  # it could not tell any more
    assert re.search(rf"\nrank {rank} on {socket.gethostname()}: {phase} of step 5 for", last), out
    assert (
        " in suffer\n" in last and " in suffer\n" in (tmp_path / "logs" / "hang-1.txt").read_text()
    )
    assert last.strip().endswith("logs/hang-1.txt") and "Traceback" not in out


@pytest.mark.exhaustive
def test_a_hang_in_validation_is_reported_before_its_collectives_give_up(tmp_path):
    """It may take as long as a start, which compiles; they would wait 15 s more than a step."""
    argv = "--validation.enable --validation.freq=5 --validation.steps=2".split()
    argv += ["--comm.train_timeout_seconds=5", "--comm.init_timeout_seconds=40"]
    code, out = finish(injure(tmp_path, "stop:validation:1:5", 3, *argv))
    last = out.partition("titanlite: the run hangs: no rank moved for 40 s")[2]
    assert code == 1 and "rank 1: stopped\n" in last and "Timed out" not in out, out


@pytest.mark.exhaustive
def test_a_rank_that_dies_when_it_is_asked_for_its_stack_does_not_hide_the_hang(tmp_path):
    code, out = finish(injure(tmp_path, "deaf:backward:1:5", 3))
    assert (
        code == 1
        and "rank 1: " in out.partition("titanlite: the run hangs: no rank moved for 3 s")[2]
    ), out
    assert "SIGUSR2" not in out and "failed first" not in out, out


@pytest.mark.parametrize("rank", sample([0, 1], long=[1]))
def test_a_culprit_on_any_node_is_asked_by_its_launcher_and_is_the_failure_that_is_told(
    tmp_path, rank
):
    """The other rank fails too, when the culprit is killed."""
    argv, port = [*HANGS, "--fault.stall_seconds=3"], free_port()
    nodes = [
        node(number, port, argv, tmp_path, INJURY=f"stop:backward:{rank}:5") for number in (1, 0)
    ]
    (_, second), (code, first) = [finish(process) for process in nodes]
    last = first.partition("titanlite: the run hangs: ")[2]
    assert (
        code == nodes[0].returncode == 1
        and f"rank {rank}: stopped\n" in last
        and " in suffer\n" in last
    ), first
    assert f"rank {rank}: stopped" in second and "failed first" not in first + second, second


@pytest.mark.exhaustive
def test_a_rank_that_hangs_at_the_end_is_ended_though_node_0_is_done(tmp_path):
    argv, port = [*HANGS, "--training.steps=3", "--fault.stall_seconds=3"], free_port()
    nodes = [node(number, port, argv, tmp_path, INJURY="sleep:end:1:0") for number in (1, 0)]
    (_, second), (code, first) = [finish(process) for process in nodes]
    assert (
        code == nodes[0].returncode == 1
        and "rank 1 on " in second
        and ": end of step 3 for " in second
    ), second
    assert " in suffer\n" in second and "the run hangs" in first, first


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", ["sleep:backward:1:5", "stop:backward:1:5"])
def test_below_torchrun_rank_0_judges_and_every_rank_dumps_its_stack(tmp_path, fault):
    run = "torch.distributed.run --standalone --nproc-per-node=2 -m titanlite.train"
    process = start([*HANGS, "--fault.stall_seconds=4"], tmp_path, module=run, INJURY=fault)
    code, out = finish(process)
    assert (
        code == 1
        and "titanlite: the run hangs: no rank moved for 4 s (fault.stall_seconds). rank 1: " in out
    ), out
    assert (
        ("rank 1: not in a collective" in out) == (" in suffer\n" in out) == ("sleep" in fault)
    ), out
    assert "all_gather" in (tmp_path / "logs" / "rank-0.stack").read_text()


@pytest.mark.exhaustive
def test_a_rank_that_never_connects_is_named(tmp_path):
    process = injure(tmp_path, "stop:start:1:0", 3, "--comm.init_timeout_seconds=25")
    code, out = finish(process)
    assert (
        code == 1 and "no rank moved for 25 s (comm.init_timeout_seconds). rank 1: stopped\n" in out
    ), out
    assert "\nrank 1: before its first heartbeat, for" in out and " in suffer\n" in out


@pytest.mark.exhaustive
def test_a_run_with_checkpoints_that_hung_starts_again(tmp_path):
    argv = "--checkpoint.enable --checkpoint.async_mode=disabled --checkpoint.interval=2"
    argv += " --training.steps=8 --fault.stall_seconds=3"
    process = start([*HANGS, *argv.split()], tmp_path, NGPU="2", INJURY="sleep:backward:1:6")
    code, out = finish(process)
    assert (
        code == 0 and "(fault.stall_seconds). rank 1: " in out and "restart 1 of 3, from " in out
    ), out
    assert (
        out.index(" in suffer\n") < out.index("restart 1 of 3") < out.index("resumed step 4 from")
    )
    assert "failed first" not in out and (tmp_path / "logs" / "hang-1.txt").exists()
