"""One run a folder: a second process is refused and told who holds it, until the holders have
really ended.
"""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.messages import refused, says
from titanlite.checkpoint.commit import staging_folder
from titanlite.cli import main
from titanlite.runtime import lock

HOLDER = """
import os, sys, time
from pathlib import Path
from titanlite.runtime import lock
path = Path(sys.argv[2])
lock.take(path, "its folder") if sys.argv[1] == "take" else lock.join(path)
child = os.fork()  # as a data loader is
if child:
    print(child, flush=True)
time.sleep(60)
"""


@contextmanager
def holder(action: str, path: Path):
    """Yield a process that holds a lock and has forked a child; the child survives a kill of the
    process.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, action, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    child = int(process.stdout.readline())
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        os.kill(child, signal.SIGKILL)
        process.stdout.close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(lock, "_PATIENCE_SECONDS", 0.2)


def test_a_folder_is_in_use_until_launcher_and_rank_0_have_ended_however_they_end(tmp_path):
    path = tmp_path / "run" / lock.RUN_LOCK
    with holder("take", path) as launcher, holder("join", path) as rank_0:
        for dies in (launcher, rank_0):
            with refused("a folder", f"pid {launcher.pid} on", f"rank 0 is pid {rank_0.pid}"):
                lock.take(path, "a folder")
            os.kill(dies.pid, signal.SIGKILL)
            dies.wait()
        lock.take(path, "a folder")  # although the children that they forked are alive
    assert path.read_text().startswith(f"pid {os.getpid()} on ")


def test_rank_0_of_a_killed_launcher_never_joins_the_next_start(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "lockf", lambda file, mode: fail(errno.EAGAIN))
    with refused("another run"):
        lock.join(tmp_path / lock.RUN_LOCK)


def fail(number: int) -> None:
    raise OSError(number, os.strerror(number))


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_named_and_the_run_starts(
    number, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(fcntl, "lockf", lambda file, mode: fail(number))
    path = tmp_path / lock.RUN_LOCK
    lock.take(path, "a folder")
    out = capsys.readouterr().err
    assert out.startswith("titanlite: a folder:") and "no locks" in out and out.count("\n") == 1
    lock.join(path)
    assert not lock.works_on(path)


def test_two_processes_that_save_the_same_step_never_write_into_one_folder(tmp_path):
    target = tmp_path / "step-1"
    with staging_folder(target, None, "one") as one, staging_folder(target, None, "two") as two:
        assert one != two and one.is_dir() and two.is_dir()
        with suppress(ZeroDivisionError), staging_folder(target, None, "three") as three:
            raise ZeroDivisionError
        assert one.is_dir() and two.is_dir() and not three.exists()


def test_two_commands_do_not_prepare_the_same_shards_at_once(tmp_path, capsys):
    text, shards = tmp_path / "a.txt", tmp_path / "shards"
    text.write_text("some text")
    prepare = ["data", "prepare", f"{text}", "--out", f"{shards}"]
    with holder("take", tmp_path / ".shards.lock"):
        assert main(prepare) == 2
        says(capsys.readouterr().err, ": pid ")
    assert not shards.exists()
    assert main(prepare) == 0 and not (tmp_path / ".shards.lock").exists()


def test_a_command_that_writes_nothing_leaves_no_lock(tmp_path, capsys):
    text = tmp_path / "a.txt"
    text.write_text("some text")
    gone, new = f"{tmp_path / 'gone'}", f"{tmp_path / 'new'}"
    assert main(["data", "prepare", gone, "--out", new]) == 2
    assert not (tmp_path / ".new.lock").exists()
    assert main(["data", "prepare", f"{text}", "--out", f"{text}/shards"]) == 2
    says(capsys.readouterr().err, f"{text}/shards")
