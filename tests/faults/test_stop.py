"""A run that is asked to stop: every rank saves the same step and leaves, and the resumed run is
bit-exact.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.jobs import TINY, run_to_end
from tests.lanes import sample
from tests.launch.test_nodes import free_port
from tests.runs import descendants, finish, left_over, records, start
from titanlite.checkpoint.load import load_tensors
from titanlite.checkpoint.manifest import committed, step_folder

MANY = 100_000
ARGV = [
    *TINY,
    *(
        "--model.package=injured",
        "--checkpoint.enable",
        f"--checkpoint.interval={MANY}",
        "--metrics.log_freq=1",
    ),
    *(f"--training.steps={MANY}", f"--lr_scheduler.total_steps={MANY}", "--debug.seed=1"),
]


def started(folder: Path, *argv: str, steps: int = 5, **environ: str) -> subprocess.Popen:
    """Return the launcher of two ranks that have taken some steps."""
    process = start([*ARGV, *argv], folder, NGPU="2", **environ)
    metrics, deadline = folder / "metrics.jsonl", time.monotonic() + 300
    while not metrics.exists() or len(metrics.read_text().splitlines()) < steps:
        assert time.monotonic() < deadline and process.poll() is None, finish(process)
        time.sleep(0.05)
    return process


def worker(launcher: subprocess.Popen, rank: int) -> int:
    """Return the process id of a rank, whose children have its environment too."""
    of_rank = (
        pid
        for pid in descendants(launcher.pid)
        if f"\0RANK={rank}\0" in Path(f"/proc/{pid}/environ").read_text()
    )
    return next(of_rank)


def stopped(process: subprocess.Popen, folder: Path, reason: str, code: int = 75) -> int:
    """Return the step that the last line names, which must be the newest checkpoint if nothing was
    lost.
    """
    family = descendants(process.pid)
    found, out = finish(process)
    last = out.splitlines()[-1]
    match = re.fullmatch(
        rf"titanlite: stopped at step (\d+) of {MANY} on request \((.+?)\)(.*); (.*)", last
    )
    assert match and found == code, out
    assert re.fullmatch(reason, match[2]), last
    assert "Traceback" not in out and left_over(family) == []
    step, newest = int(match[1]), committed(folder / "checkpoint")[-1:]
    if code == 75:
        assert (
            newest == [step]
            and match[3] == ""
            and match[4] == f"saved: {step_folder(folder / 'checkpoint', step)}"
        )
    return step


def same_as_undisturbed(pool: Any, folder: Path, step: int, *argv: str, world: int = 2) -> None:
    """Resume the folder to a step, and compare with a run that was never stopped: bit for bit."""
    straight = folder.parent / "straight"
    for run in (folder, straight):
        pool.run(run_to_end, [*ARGV, *argv, f"--training.steps={step}"], str(run), world=world)
    ours, theirs = (
        load_tensors(step_folder(run / "checkpoint", step)) for run in (folder, straight)
    )
    assert (
        theirs
        and all(torch.equal(ours[name], theirs[name]) for name in theirs)
        and ours.keys() == theirs.keys()
    )
    ours, theirs = (
        [(r["step"], r["loss"], r["grad_norm"]) for r in records(run) if "loss" in r]
        for run in (folder, straight)
    )
    assert ours == theirs


@pytest.mark.parametrize("to", sample(["launcher", "rank 1"], "launcher", long=[]))
def test_sigterm_to_the_launcher_or_a_rank_saves_the_same_step_on_all_and_the_resume_is_exact(
    pool, tmp_path, to
):
    folder = tmp_path / "stopped"
    if to == "launcher":
        process = started(folder)
        process.send_signal(signal.SIGTERM)
        step = stopped(process, folder, "SIGTERM to the launcher")
    else:
        process = start(ARGV, folder, NGPU="2", INJURY="term:forward:1:6")
        step = stopped(process, folder, "SIGTERM to rank 1")
        assert step >= 6
    same_as_undisturbed(pool, folder, step + 2)


def test_ctrl_c_saves_and_exits_with_130_and_a_hangup_under_nohup_does_not_end_the_run(tmp_path):
    handler = signal.signal(
        signal.SIGHUP, signal.SIG_IGN
    )  # as nohup does; what is started inherits it
    process = started(tmp_path)
    signal.signal(signal.SIGHUP, handler)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGINT)
    step = stopped(process, tmp_path, "Ctrl-C", code=130)
    assert committed(tmp_path / "checkpoint") == [step]


@pytest.mark.exhaustive
def test_a_second_ctrl_c_ends_the_run_at_once(tmp_path):
    process = started(tmp_path, "--checkpoint.interval=3", INJURY="sleep:data:1:6")
    process.send_signal(signal.SIGINT)
    time.sleep(1.5)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert stopped(process, tmp_path, "Ctrl-C; second signal: SIGINT", code=130) == 5
    assert time.monotonic() - began < 5


@pytest.mark.exhaustive
def test_without_data_ranks_end_at_half_of_the_grace(tmp_path):
    """At its whole the launcher would have ended them, with another reason."""
    process = started(
        tmp_path, "--fault.grace_seconds=8", "--checkpoint.interval=3", INJURY="sleep:data:1:6"
    )
    process.send_signal(signal.SIGTERM)
    reason = "SIGTERM to the launcher; no data for half of fault.grace_seconds = 8"
    assert stopped(process, tmp_path, reason, code=76) == 5
    assert committed(tmp_path / "checkpoint") == [3]


@pytest.mark.exhaustive
def test_the_time_limit_stops_a_run(tmp_path):
    limit = "--fault.stop_after_minutes=0.3", "--fault.grace_seconds=10"
    process = start([*ARGV, *limit], tmp_path, NGPU="2")
    stopped(process, tmp_path, "fault.stop_after_minutes = 0.3")


PHASES = ["forward:1", "data:6", "backward:6", "validation:6", "save:6"]


@pytest.mark.parametrize(
    ("rank", "where"),
    sample(
        [(at % 2, where) for at, where in enumerate(PHASES)],
        long=[(0, "save:6")],
    ),
)
def test_a_request_is_heeded_in_any_phase(tmp_path, rank, where):
    """In the first step it compiles; a validation is abandoned; a save of the step is finished, and
    none added.
    """
    phase, step = where.split(":")
    validation = ["--validation.enable", "--validation.freq=6", "--validation.steps=40"]
    argv = [*ARGV, *validation, "--checkpoint.interval=6", "--checkpoint.async_mode=async"]
    process = start(argv, tmp_path, NGPU="2", INJURY=f"term:{phase}:{rank}:{step}")
    reached = stopped(process, tmp_path, f"SIGTERM to rank {rank}")
    assert int(step) <= reached <= int(step) + 2
    assert [r["step"] for r in records(tmp_path) if "validation_loss" in r] == [6] * (
        phase == "save"
    )
    saves = [r["step"] for r in records(tmp_path) if "checkpoint_write_seconds" in r]
    assert saves == sorted({*saves}) and saves[-1] == reached


@pytest.mark.exhaustive
@pytest.mark.parametrize("signaled", ["a rank", "the launcher", "all", "before"])
def test_a_run_that_only_starts_loses_nothing(tmp_path, signaled):
    """A rank dies of a signal that it is too young to hear, and the launcher knows why."""
    nodes = {
        "NNODES": "2",
        "NODE_RANK": "0",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(free_port()),
    }
    injury = (
        {"INJURY": "term:start:1:0"}
        if signaled == "a rank"
        else nodes
        if signaled == "before"
        else {}
    )
    process = start(ARGV, tmp_path, NGPU="2", **injury)
    if signaled != "a rank":
        assert process.stdout
        process.stdout.readline()  # "2 processes on the CPU"
        time.sleep(1)
        for pid in [process.pid, *(descendants(process.pid) if signaled == "all" else [])]:
            os.kill(pid, signal.SIGTERM)
    found, out = finish(process)
    assert found == 75 and "Traceback" not in out, out
    assert re.search(
        r"stopped at step [012] of 100000 on request "
        r"\(SIGTERM to (the launcher|a rank that was starting)\); ",
        out,
    )


@pytest.mark.parametrize("to", sample(["the launcher", "rank 1"], long=["rank 1"]))
def test_a_second_signal_ends_the_run_at_once_and_names_what_is_lost(tmp_path, to):
    """The save would take longer than anyone waits."""
    argv = ["--fault.grace_seconds=600", "--checkpoint.interval=3", "--metrics.log_freq=2"]
    process = started(tmp_path, *argv, steps=3, INJURY="sleep:backward:0:6")
    time.sleep(2)  # step 5 is not logged
    target = process.pid if to == "the launcher" else worker(process, 1)
    os.kill(target, signal.SIGUSR1)
    time.sleep(1.5)
    os.kill(target, signal.SIGTERM)
    assert stopped(process, tmp_path, f"SIGUSR1 to {to}; second signal: SIGTERM", code=76) == 5
    assert committed(tmp_path / "checkpoint") == [3]


@pytest.mark.exhaustive
def test_the_first_signal_to_a_launcher_is_no_second_one_if_others_have_asked(tmp_path):
    """As a scheduler ends nodes one after the other."""
    process = started(tmp_path, INJURY="stop:backward:0:6")
    os.kill(worker(process, 1), signal.SIGUSR1)
    time.sleep(3)  # the launcher has heard of it
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    os.kill(worker(process, 0), signal.SIGCONT)
    stopped(process, tmp_path, "SIGUSR1 to rank 1")


@pytest.mark.long
def test_a_rank_that_dies_in_the_last_save_leaves_a_run_to_start_again(tmp_path):
    kills = ",".join(f"kill:save:0:{step}" for step in (6, 7, 8))
    # Step 3 is committed when training goes on: the stopped rank could not finish it.
    argv = ["--checkpoint.interval=3", "--checkpoint.async_mode=disabled"]
    process = started(tmp_path, *argv, INJURY=f"stop:backward:0:6,{kills}")
    rank_0 = worker(process, 0)
    process.send_signal(signal.SIGTERM)
    time.sleep(2)  # all have heard of it
    os.kill(rank_0, signal.SIGCONT)
    assert stopped(process, tmp_path, "SIGTERM to the launcher", code=76) in (6, 7, 8)
    assert committed(tmp_path / "checkpoint") == [3]


@pytest.mark.exhaustive
def test_ranks_that_the_system_has_stopped_are_killed_after_the_grace(tmp_path):
    """They cannot hear, nor end themselves."""
    process = started(
        tmp_path, "--fault.grace_seconds=3", "--checkpoint.interval=3", INJURY="stop:data:1:6"
    )
    process.send_signal(signal.SIGTERM)
    reason = "SIGTERM to the launcher; (fault.grace_seconds = 3 ran out|another rank had left)"
    assert stopped(process, tmp_path, reason, code=76) == 5


@pytest.mark.exhaustive
def test_without_checkpoints_a_signal_ends_the_run_at_once(tmp_path):
    process = started(tmp_path, "--checkpoint.no_enable")
    process.send_signal(signal.SIGUSR1)
    code, out = finish(process)
    assert (
        code == 128 + signal.SIGUSR1
        and "nothing was saved: checkpoint.enable is off" in out.splitlines()[-1]
    )


@pytest.mark.parametrize("split", sample(["tensor", "pipeline"], long=["pipeline"]))
def test_peers_that_do_not_share_the_loss_hear_too(pool, tmp_path, split):
    argv = [f"--parallelism.{split}_parallel_degree=2", "--model.overrides.n_kv_heads=2"]
    process = start([*ARGV, *argv], tmp_path / "stopped", NGPU="2", INJURY="usr1:forward:0:4")
    reached = stopped(process, tmp_path / "stopped", "SIGUSR1 to rank 0")
    same_as_undisturbed(pool, tmp_path / "stopped", reached + 1, *argv)


@pytest.mark.exhaustive
def test_without_the_launcher_ranks_exit_with_75_themselves(tmp_path):
    """Also where who started them had blocked the signals, which is inherited."""
    torchrun = "torch.distributed.run --standalone --nproc-per-node=2 -m titanlite.train"
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    process = start(ARGV, tmp_path, module=torchrun, INJURY="term:forward:1:4")
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    code, out = finish(process)
    (step,) = committed(tmp_path / "checkpoint")
    assert (
        code == 1
        and re.search(r"exitcode +: 75 ", out)
        and f"stopped at step {step} of {MANY} on request" in out
    )


@pytest.mark.exhaustive
def test_a_signal_before_the_config_is_known_waits_until_it_is(tmp_path):
    """Without checkpoints it would end the launcher by the signal."""
    process, deadline = start(ARGV, tmp_path, NGPU="2"), time.monotonic() + 30
    while not blocked(process.pid) >> (signal.SIGTERM - 1) & 1 and time.monotonic() < deadline:
        time.sleep(0.001)
    process.send_signal(signal.SIGTERM)
    code, out = finish(process)
    assert (
        code == 75 and "stopped at step 0 of 100000 on request (SIGTERM to the launcher); " in out
    ), out


def blocked(pid: int) -> int:
    """Return the signals that a process holds back, as bits."""
    return int(re.search(r"SigBlk:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())[1], 16)  # type: ignore[index]


@pytest.mark.exhaustive
def test_a_signal_to_all_processes_of_a_job_is_one_request(tmp_path):
    """As schedulers send it, and some of them twice: also to the data workers, without which ranks
    get no data.
    """
    process = started(tmp_path, "--training.dataloader.num_workers=1")
    for _ in range(2):
        for pid in [process.pid, *descendants(process.pid)]:
            os.kill(pid, signal.SIGTERM)
    stopped(process, tmp_path, "SIGTERM to .*")


@pytest.mark.exhaustive
def test_a_rank_that_is_ended_because_of_another_was_not_asked(tmp_path):
    """The failure of the other is the outcome, and is not waited with."""
    injury = {"INJURY": "raise:data:1:6,sleep:data:0:6", "MAX_RESTARTS": "0"}
    code, out = finish(start(ARGV, tmp_path, NGPU="2", **injury))
    assert (
        code == 1
        and "rank 1 on " in out
        and "ValueError: a fault was put in here" in out.splitlines()[-1]
    )
    assert "on request" not in out
