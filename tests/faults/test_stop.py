"""A run that is asked to stop: every rank saves the same step and leaves, and the resumed run is
bit-exact.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from typing import Any

import pytest
import torch

from tests.jobs import TINY, run_to_end
from tests.launch.nodes import outputs, rendezvous, start_tasks, trained
from tests.messages import says
from tests.runs import (
    descendants,
    finish,
    left_over,
    losses,
    rank_pid,
    records,
    run,
    signal_all,
    start,
)
from titanlite.checkpoint.load import load_tensors
from titanlite.checkpoint.manifest import committed, step_folder
from titanlite.errors import CUT_SHORT, FAILED, STOPPED
from titanlite.runtime.store import LocalPath

MANY = 100_000
ARGV = [
    *TINY,
    "--model.package=injured",
    "--checkpoint.enable",
    f"--checkpoint.interval={MANY}",
    "--metrics.log_freq=1",
    f"--training.steps={MANY}",
    f"--lr_scheduler.total_steps={MANY}",
    "--debug.seed=1",
]
EARLIER = "--checkpoint.interval=3"
CTRL_C = 128 + signal.SIGINT


def started(folder: LocalPath, *argv: str, steps: int = 5, **environ: str) -> subprocess.Popen:
    """Return the launcher of two ranks that have taken some steps."""
    process = start([*ARGV, *argv], folder, NGPU="2", **environ)
    trained(folder, process, steps)
    return process


def stopped(process: subprocess.Popen, folder: LocalPath, *reason: str, code: int = STOPPED) -> int:
    """Wait for the end; return the step that the last line names, the newest checkpoint's where
    nothing was lost.
    """
    family = descendants(process.pid)
    found, out = finish(process)
    assert found == code and "Traceback" not in out, out
    assert left_over(family) == []
    last = out.splitlines()[-1]
    says(last, "on request", *reason)
    (step,) = map(int, re.findall(rf"step (\d+) of {MANY}", last))
    if code == STOPPED:
        assert committed(folder / "checkpoint")[-1] == step
        says(last, step_folder(folder / "checkpoint", step))
    return step


def same_as_undisturbed(pool: Any, folder: LocalPath, step: int, *argv: str) -> None:
    """Resume the folder to a step, and compare with a run that was never stopped: bit for bit."""
    straight = folder.parent / "straight"
    for each in (folder, straight):
        pool.run(run_to_end, [*ARGV, *argv, f"--training.steps={step}"], str(each), world=2)
    ours, theirs = (
        load_tensors(step_folder(each / "checkpoint", step)) for each in (folder, straight)
    )
    assert theirs and ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert losses(folder) == losses(straight)


def test_sigterm_saves_the_same_step_on_all_ranks_and_the_resume_is_exact(pool, tmp_path):
    folder = tmp_path / "stopped"
    process = started(folder)
    process.send_signal(signal.SIGTERM)
    step = stopped(process, folder, "SIGTERM", "launcher")
    same_as_undisturbed(pool, folder, step + 2)


@pytest.mark.long
@pytest.mark.parametrize(
    ("to", "first", "second", "code"),
    [
        ("rank 1", signal.SIGUSR1, signal.SIGTERM, CUT_SHORT),
        ("Ctrl-C", signal.SIGINT, signal.SIGINT, CTRL_C),
    ],
)
def test_a_second_signal_ends_the_run_at_once_and_names_what_is_lost(
    tmp_path, to, first, second, code
):
    """The save would take longer than anyone waits."""
    argv = ["--fault.grace_seconds=600", EARLIER, "--metrics.log_freq=2"]
    process = started(tmp_path, *argv, steps=3, INJURY="sleep:backward:0:6")
    time.sleep(2)  # step 5 is not logged
    target = process.pid if to == "Ctrl-C" else rank_pid(process, 1)
    os.kill(target, first)
    time.sleep(1.5)
    os.kill(target, second)
    assert stopped(process, tmp_path, to, second.name, code=code) == 5
    assert committed(tmp_path / "checkpoint") == [3]


@pytest.mark.long
def test_without_data_ranks_end_at_half_of_the_grace(tmp_path):
    """At its whole the launcher would have ended them, with another reason."""
    argv = ["--fault.grace_seconds=8", EARLIER]
    process = started(tmp_path, *argv, INJURY="sleep:data:1:6")
    process.send_signal(signal.SIGTERM)
    reason = "SIGTERM", "no data", "fault.grace_seconds = 8"
    assert stopped(process, tmp_path, *reason, code=CUT_SHORT) == 5
    assert committed(tmp_path / "checkpoint") == [3]


@pytest.mark.long
def test_the_time_limit_stops_a_run(tmp_path):
    limit = "--fault.stop_after_minutes=0.3", "--fault.grace_seconds=15"
    process = start([*ARGV, *limit], tmp_path, NGPU="2")
    stopped(process, tmp_path, "fault.stop_after_minutes = 0.3")


@pytest.mark.long
@pytest.mark.parametrize(("where", "at"), [("forward", 1), ("validation", 6), ("save", 6)])
def test_a_request_is_heeded_in_any_phase(tmp_path, where, at):
    """In the first step it compiles; a validation is abandoned; a save of the step is finished, and
    none added.
    """
    validation = ["--validation.enable", "--validation.freq=6", "--validation.steps=40"]
    argv = [*ARGV, *validation, "--checkpoint.interval=6", "--checkpoint.async_mode=async"]
    process = start(argv, tmp_path, NGPU="2", INJURY=f"term:{where}:1:{at}")
    reached = stopped(process, tmp_path, "SIGTERM", "rank 1")
    assert at <= reached <= at + 2
    validated = [r["step"] for r in records(tmp_path) if "validation_loss" in r]
    assert validated == [6] * (where == "save")
    saves = [r["step"] for r in records(tmp_path) if "checkpoint_write_seconds" in r]
    assert saves == sorted({*saves}) and saves[-1] == reached


@pytest.mark.long
def test_a_signal_before_the_config_is_known_waits_until_it_is(tmp_path):
    """Without checkpoints it would end the launcher by the signal."""
    process, deadline = start(ARGV, tmp_path, NGPU="2"), time.monotonic() + 30
    while not blocked(process.pid) >> (signal.SIGTERM - 1) & 1 and time.monotonic() < deadline:
        time.sleep(0.001)
    process.send_signal(signal.SIGTERM)
    code, out = finish(process)
    assert code == STOPPED, out
    says(out, "before a step", "SIGTERM", "launcher")


def blocked(pid: int) -> int:
    """Return the signals that a process holds back, as bits."""
    (bits,) = re.findall(r"SigBlk:\s*(\w+)", LocalPath(f"/proc/{pid}/status").read_text())
    return int(bits, 16)


@pytest.mark.long
def test_without_checkpoints_a_signal_ends_the_run_at_once(tmp_path):
    process = started(tmp_path, "--checkpoint.no_enable")
    process.send_signal(signal.SIGUSR1)
    code, out = finish(process)
    assert code == 128 + signal.SIGUSR1, out
    says(out.splitlines()[-1], "nothing was", "checkpoint.enable")


@pytest.mark.long
def test_peers_that_do_not_share_the_loss_hear_too(pool, tmp_path):
    argv = ["--parallelism.pipeline_parallel_degree=2", "--model.overrides.n_kv_heads=2"]
    folder = tmp_path / "stopped"
    process = start([*ARGV, *argv], folder, NGPU="2", INJURY="usr1:forward:0:4")
    reached = stopped(process, folder, "SIGUSR1", "rank 0")
    same_as_undisturbed(pool, folder, reached + 1, *argv)


@pytest.mark.long
def test_without_the_launcher_ranks_exit_with_75_themselves(tmp_path):
    """Also where who started them had blocked the signals, which is inherited."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    tasks = start_tasks(ARGV, tmp_path, **rendezvous(), INJURY="term:forward:1:4")
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    first, _ = outputs(tasks, STOPPED)
    (step,) = committed(tmp_path / "checkpoint")
    says(first, f"step {step} of {MANY} on request")


@pytest.mark.long
def test_a_signal_to_all_processes_of_a_job_is_one_request(tmp_path):
    """As schedulers send it, and some of them twice: also to the data workers, without which ranks
    get no data.
    """
    process = started(tmp_path, "--training.dataloader.num_workers=1")
    signal_all(process, signal.SIGTERM)
    signal_all(process, signal.SIGTERM)
    stopped(process, tmp_path, "SIGTERM")


@pytest.mark.long
def test_a_rank_that_is_ended_because_of_another_was_not_asked(tmp_path):
    """The failure of the other is the outcome, and is not waited with."""
    injury = {"INJURY": "raise:data:1:6,sleep:data:0:6", "MAX_RESTARTS": "0"}
    ended = run(ARGV, tmp_path, 2, FAILED, **injury)
    says(ended.out, "rank 1 on ")
    says(ended.out.splitlines()[-1], "ValueError")
    assert "on request" not in ended.out
