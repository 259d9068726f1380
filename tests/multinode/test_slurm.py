"""scripts/slurm/train.slurm under SLURM itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.multinode.hosts import ARGV, Hosts, NoHosts
from tests.multinode.slurm import Slurm, missing, wait_until
from tests.runs import ROOT, losses, run
from titanlite.errors import FAILED, STOPPED

pytestmark = pytest.mark.long
SCRIPT = str(ROOT / "scripts" / "slurm" / "train.slurm")
SMALL = ("--gpus-per-node=0", "--cpus-per-task=1")
STAND_IN = """#!/usr/bin/env python3
# A launcher that writes down its signals, saves after the first, and exits with a code.
import os, signal, sys, time
told = open(f"{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_NODEID']}", "ab", buffering=0)
received = []
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, _: \
received.append(told.write(signal.Signals(number).name.encode() + b" ")))
told.write(b"started ")
while not received:
    time.sleep(0.05)
time.sleep(0.5 + 2 * int(os.environ["SLURM_NODEID"]))  # node 1 still does when node 0 has left
told.write(b"saved ")
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if reason := missing():
        pytest.skip(reason)
    try:
        hosts = Hosts(2)
    except NoHosts as reason:
        pytest.skip(str(reason))
    yield Slurm(hosts, tmp_path_factory.mktemp("slurm"))
    hosts.do("down")


def start(slurm: Slurm, code: int, folder: Path) -> str:
    """Submit the script with the stand-in for a launcher; return the job when both have started."""
    (folder / "run_train.sh").write_text(STAND_IN)
    (folder / "run_train.sh").chmod(0o755)
    job = slurm.submit(*SMALL, SCRIPT, str(code), folder=folder)
    wait_until(lambda: told(folder, job) == ["started"] * 2, "the launchers")
    return job


def has_started(slurm: Slurm, job: str) -> bool:
    """Ask SLURM to start a queued job now; it sets the time, two minutes later, after the job is in
    the queue.
    """
    slurm.ask("scontrol", "update", f"JobId={job}", "StartTime=now")
    return not slurm.state(job).startswith("PENDING")


def told(folder: Path, job: str) -> list[str]:
    return [log.read_text().strip() for log in sorted(folder.glob(f"{job}.*"))]


@pytest.mark.parametrize(("code", "state"), [(STOPPED, "PENDING 1"), (FAILED, "FAILED 0")])
def test_launchers_get_the_warning_once_and_the_job_is_queued_again_if_they_stopped_on_request(
    slurm, tmp_path, code, state
):
    job = start(slurm, code, tmp_path)
    slurm.ask("scancel", "--batch", "--signal=USR1", job)  # as SLURM does before the time limit
    slurm.wait_for(job, state)
    assert told(tmp_path, job) == ["started SIGUSR1 saved"] * 2
    slurm.ask("scancel", job)


def test_a_preempted_job_saves_and_is_queued_again(slurm, tmp_path):
    job = start(slurm, STOPPED, tmp_path)
    slurm.ask("scancel", "--signal=TERM", job)  # to the launchers, as at a preemption
    slurm.wait_for(job, "PENDING 1")
    assert told(tmp_path, job) == ["started SIGTERM saved"] * 2
    slurm.ask("scancel", job)


def test_a_canceled_job_saves_and_is_not_queued_again(slurm, tmp_path):
    job = start(slurm, STOPPED, tmp_path)
    slurm.ask("scancel", job)
    wait_until(
        lambda: not slurm.ask("squeue", "--noheader", f"--jobs={job}"), "the job to leave the queue"
    )
    assert slurm.state(job) == "CANCELLED 0"
    assert told(tmp_path, job) == ["started SIGTERM saved"] * 2


def test_a_run_that_slurm_stops_and_starts_again_has_the_losses_of_an_undisturbed_one(
    slurm, tmp_path
):
    argv = [*ARGV, "--checkpoint.enable", "--checkpoint.interval=10", "--training.steps=150"]
    words = [*SMALL, "--export=ALL,NGPU=1", f"--output={tmp_path}/job.out", SCRIPT, *argv]
    job = slurm.submit(*words, f"--job.dump_folder={tmp_path}/two", folder=ROOT)
    wait_until((tmp_path / "two" / "checkpoint" / "step-10").exists, "the first checkpoint", 500)
    slurm.ask("scancel", "--batch", "--signal=USR1", job)
    slurm.wait_for(job, "PENDING 1")
    slurm.wait_for_nodes()
    # In the second in which a node ended the job it refuses to start it ("Job credential revoked").
    time.sleep(1)
    wait_until(lambda: has_started(slurm, job), "the job to start again", 200)
    slurm.wait_for(job, "COMPLETED 1", 200)
    two, one = losses(tmp_path / "two"), run(argv, tmp_path / "one").losses
    assert two == pytest.approx(one, rel=1e-9), (tmp_path / "job.out").read_text()
