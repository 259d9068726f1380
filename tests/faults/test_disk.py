"""Disks that fill up, fail or are slow in a save: all ranks know, and the next start resumes a
complete step.
"""

import errno
import re
import subprocess
from contextlib import ExitStack, suppress

import pytest

from tests.checkpoint.saved import SAVING, rank, run_until, steps_in
from tests.jobs import TINY, files_of_at_most, keeping_log, trainer
from tests.messages import says
from tests.runs import run
from titanlite.checkpoint.manifest import is_complete, step_folder
from titanlite.runtime.store import LocalPath

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


def break_disk(how: str, root: LocalPath, broken: ExitStack) -> None:
    """Let writing fail until the stack ends."""
    if how == "full" and rank() == 0:
        broken.callback((root / BALLAST).unlink)
        with (root / BALLAST).open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError as error:
                assert error.errno == errno.ENOSPC
    if how == "limit" and rank() == 1:
        broken.enter_context(files_of_at_most(20_000))


def on_a_bad_disk(how: str, disk: str, argv: list[str], folder: str) -> tuple[str, list[str]]:
    """Train with a disk that is bad from step 4 on; return the error and the log."""
    log, lines = keeping_log()
    run = trainer(argv, folder, log)
    fetch, broken = run.next_micro_batches, ExitStack()

    def next_micro_batches() -> list:
        if run.saver._pending:
            run.saver._pending.join()
        if run.step == 4:
            break_disk(how, LocalPath(disk), broken)
        return fetch()

    run.next_micro_batches = next_micro_batches  # type: ignore[method-assign]
    with broken:
        try:
            run.train()
        except Exception as error:
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


ERRORS = {"full": "No space left on device", "limit": "File too large"}


@pytest.mark.parametrize("how", ERRORS)
def test_a_bad_disk_stops_all_ranks_and_the_next_start_resumes(pool, tmp_path, small_disk, how):
    if how == "full" and not small_disk:
        pytest.skip(NO_MOUNT)
    disk = f"{tmp_path}/checkpoint"
    for message, lines in pool.run(on_a_bad_disk, how, disk, ARGV, str(tmp_path), world=2):
        says(message, "save of step 4", "on rank", ERRORS[how], "is step-2")
        assert lines[-1].startswith("step:  5"), "within one logging interval"
    assert steps_in(tmp_path) == ["step-2"] and is_complete(step_folder(LocalPath(disk), 2))
    assert LocalPath(disk, "latest").read_text() == "step-2\n"
    for part in pool.run(run_until, ARGV, str(tmp_path), world=2):
        assert (part["begun"], part["step"]) == (2, 8)
    assert steps_in(tmp_path) == [f"step-{step}" for step in (2, 4, 6, 8)]


def test_a_run_whose_disk_is_full_is_refused_before_it_starts(tmp_path, small_disk):
    if not small_disk:
        pytest.skip(NO_MOUNT)
    disk = tmp_path / "checkpoint"
    with suppress(OSError), (disk / "all of it").open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    says(run(TINY, disk / "run", code=2).out, "job.dump_folder", ERRORS["full"])


@pytest.mark.long
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
        message, lines = pool.run(on_a_bad_disk, "", "", argv, str(tmp_path), world=2)[0]
        says(message, ERRORS["full"])
        assert "enforce fail" not in message
        (warning,) = [line for line in lines if "room for" in line]
        says(warning, "iB free", "keep_latest_k = 99")
        assert re.search(r"room for \d+ more", warning)
