"""Disks that fill up, fail or are slow in a save: all ranks know, and the next start resumes a
complete step.
"""

import errno
import os
import re
import resource
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.saved import SAVING, keeping_log, rank, run_until, steps_in
from tests.faults.rounds import slow_save
from tests.jobs import trainer
from tests.lanes import sample
from tests.messages import says
from tests.observe.test_sinks import tensorboard
from tests.runs import losses
from titanlite.checkpoint.manifest import is_complete, step_folder

ARGV = [*SAVING, "--checkpoint.interval=2", "--training.steps=8"]
BALLAST = "ballast"
NO_MOUNT = "mounting a small disk is not allowed here"


@pytest.fixture
def small_disk(tmp_path, request):
    """Mount a small file system for the checkpoints, or another folder; False if mounting is not
    allowed.
    """
    folder = tmp_path / getattr(request, "param", "checkpoint")
    folder.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "titanlite-test", str(folder)]
    mounted = subprocess.run(mount, capture_output=True).returncode == 0
    yield mounted
    if mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def break_disk(how: str, root: Path) -> Callable[[], None]:
    """Let writing fail from now on; return what repairs it."""
    if how == "full" and rank() == 0:
        with (root / BALLAST).open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError as error:
                assert error.errno == errno.ENOSPC
        return (root / BALLAST).unlink
    if how == "limit" and rank() == 1:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (20_000, limits[1])
        )  # Python ignores the signal; the write fails
        return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    if how == "EIO" and rank() == 1:
        fsync = os.fsync

        def fail(fd: Any) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        os.fsync = fail
        return lambda: setattr(os, "fsync", fsync)
    return lambda: None


def on_a_bad_disk(
    how: str, disk: str, argv: list[str], folder: str, repaired_at: int = 6
) -> tuple[str, list[str]]:
    """Train with a disk that is bad from step 4 until it is repaired; return the error and the
    log.
    """
    log, lines = keeping_log()
    run = trainer(argv, folder, log)
    fetch, repair = run.next_micro_batches, lambda: None

    def next_micro_batches() -> list:
        nonlocal repair
        if run.saver._pending:
            run.saver._pending.join()
        if run.step == 4:
            repair = break_disk(how, Path(disk))
        if run.step == repaired_at:
            repair()
        return fetch()

    run.next_micro_batches = next_micro_batches  # type: ignore[method-assign]
    try:
        run.train()
    except Exception as error:
        repair()
        return f"{type(error).__name__}: {error}", lines
    return "", lines


@pytest.mark.long
def test_later_checkpoints_are_archived_where_their_disk_is(pool, tmp_path, small_disk):
    if not small_disk:
        pytest.skip(NO_MOUNT)
    pool.run(run_until, ARGV, str(tmp_path), world=1)
    pool.run(run_until, [*ARGV, "--checkpoint.load_step=4"], str(tmp_path), world=1)
    assert [path.name for path in sorted(tmp_path.glob("checkpoint/previous/*/checkpoint/*"))] == [
        "step-6",
        "step-8",
    ]


ERRORS = {"full": "No space left on device", "limit": "File too large", "EIO": "Input/output error"}


@pytest.mark.parametrize("how", sample(ERRORS, "full"))
def test_a_bad_disk_stops_all_ranks_and_the_next_start_resumes(pool, tmp_path, small_disk, how):
    if how == "full" and not small_disk:
        pytest.skip(NO_MOUNT)
    disk = f"{tmp_path}/checkpoint"
    for message, lines in pool.run(on_a_bad_disk, how, disk, ARGV, str(tmp_path), world=2):
        says(message, "save of step 4", "on rank", ERRORS[how], "is step-2")
        assert lines[-1].startswith("step:  5"), "within one logging interval"
    assert steps_in(tmp_path) == ["step-2"] and is_complete(step_folder(Path(disk), 2))
    for part in pool.run(run_until, ARGV, str(tmp_path), world=2):
        assert (part["begun"], part["step"]) == (2, 8)
    assert steps_in(tmp_path) == [f"step-{step}" for step in (2, 4, 6, 8)]


@pytest.mark.long
@pytest.mark.parametrize("how", ["full", "limit"])
def test_on_failure_warn_writes_again_when_there_is_space(pool, tmp_path, small_disk, how):
    if how == "full" and not small_disk:
        pytest.skip(NO_MOUNT)
    argv, disk = [*ARGV, "--checkpoint.on_failure=warn"], f"{tmp_path}/checkpoint"
    for message, lines in pool.run(on_a_bad_disk, how, disk, argv, str(tmp_path), world=2):
        (warned,) = [number for number, line in enumerate(lines) if ERRORS[how] in line]
        assert message == "" and lines[warned - 1].startswith("step:  5")
        says(lines[warned], "training continues")
    assert steps_in(tmp_path) == ["step-2", "step-6", "step-8"]


@pytest.mark.parametrize("small_disk", [""], indirect=True)
@pytest.mark.parametrize("on_failure", sample(["warn", "stop"], "warn"))
def test_a_full_disk_under_the_metrics_ends_a_run_only_where_a_failed_save_does(
    pool, tmp_path, small_disk, on_failure
):
    if not small_disk:
        pytest.skip(NO_MOUNT)
    argv = [
        *SAVING,
        "--checkpoint.interval=10",
        f"--checkpoint.on_failure={on_failure}",
        "--training.steps=40",
        "--lr_scheduler.total_steps=40",
        "--metrics.enable_tensorboard",
    ]
    folder = str(tmp_path)
    ((message, lines),) = pool.run(on_a_bad_disk, "full", folder, argv, folder, 30, world=1)
    steps = [*losses(tmp_path)]
    if on_failure == "stop":
        assert re.match(r"RunFailed: (metrics: |the save of step 10 )", message)
        says(message, ERRORS["full"], "would continue")
        assert steps[-1] < 29
        return
    assert message == "" and sorted(set(steps)) == steps and len(steps) < 40
    assert steps[:3] == [1, 2, 3] and steps[-11:] == [*range(30, 41)]
    lost = "\n".join(line for line in lines if "metrics of step 29" in line)
    for path in (tmp_path / "metrics.jsonl", *tmp_path.glob("tb/*")):
        says(lost, f"[Errno 28] {ERRORS['full']}: '{path}'", "training continues")
    assert {1, 2, 3, *range(30, 41)} <= tensorboard(tmp_path / "tb")["lr"].keys()
    assert steps_in(tmp_path) == ["step-30", "step-40"]


@pytest.mark.long
def test_a_slow_save_does_not_meet_the_training_timeout(pool, tmp_path):
    for step, took in pool.run(slow_save, 6.0, 2.0, str(tmp_path), world=2):
        assert step == 4 and took >= 6
    assert steps_in(tmp_path) == ["step-2", "step-4"]


def refused_on_a_small_disk(argv: list[str], folder: str) -> tuple[str, list[str]]:
    log, lines = keeping_log()
    try:
        trainer(argv, folder, log).train()
    except Exception as error:
        return f"{error}", lines
    return "", lines


def test_each_start_on_a_full_disk_names_the_cause_and_what_would_fit(pool, tmp_path, small_disk):
    if not small_disk:
        pytest.skip(NO_MOUNT)
    argv = [
        *ARGV,
        "--model.overrides.dim=32",
        "--checkpoint.keep_latest_k=99",
        "--checkpoint.interval=1",
        "--checkpoint.async_mode=disabled",
    ]
    for _ in range(3):
        message, lines = pool.run(refused_on_a_small_disk, argv, str(tmp_path), world=2)[0]
        says(message, ERRORS["full"])
        assert "enforce fail" not in message
        (warning,) = [line for line in lines if "room for" in line]
        says(warning, "iB free", "keep_latest_k = 99")
        assert re.search(r"room for \d+ more", warning)
