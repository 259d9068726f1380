"""A kill -9 at any moment of a save loses no more than that save, and the next start needs no help."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.checkpoint.saved import SAVING, rank, run_until, steps_in
from tests.jobs import TINY, trainer
from tests.launch.run import finish, records, start, train
from titanlite.checkpoint import commit
from titanlite.checkpoint.folder import faults, read_manifest, step_folder
from titanlite.runtime.pool import Pool, RankFailed

ARGV = [*SAVING, "--training.steps=5", "--checkpoint.keep_latest_k=1"]
AFTER_THE_RENAME = commit.POINTS[commit.POINTS.index("after the rename") :]
ON_EVERY_RANK = ("file begun", "half a file", "file written", "tensors stored")


@pytest.fixture(scope="module")
def mortal():
    ranks = Pool(2, preload=["titanlite.trainer"])
    yield ranks
    ranks.close()


def killed_at(fatal: str, on_rank: int, folder: str) -> None:
    """SIGKILL when the save of step 3 comes to a point."""
    run = trainer(ARGV, folder)

    def reached(point: str) -> None:
        flight = run.checkpoints._flight
        if point == fatal and rank() == on_rank and flight and flight.step == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    commit.reached = reached
    run.train()


@pytest.fixture(scope="module")
def straight(mortal, tmp_path_factory):
    return mortal.run(run_until, ARGV, str(tmp_path_factory.mktemp("straight")), world=2)


@pytest.mark.parametrize("point", ["half a file", "half a manifest", "after the rename", "half a deletion"])
def test_after_a_kill_in_a_save_the_run_goes_on_from_a_whole_step(mortal, straight, tmp_path, point):
    on_rank = int(point in ON_EVERY_RANK)
    with pytest.raises(RankFailed, match=r"died \(exit code -9\)|[Cc]onnection"):
        mortal.run(killed_at, point, on_rank, str(tmp_path), world=2)
    root = tmp_path / "checkpoint"
    whole = 3 if point in AFTER_THE_RENAME else 2
    manifest = read_manifest(step_folder(root, whole))
    assert faults(step_folder(root, whole), manifest, manifest.files) == []
    parts = mortal.run(run_until, ARGV, str(tmp_path), world=2)
    assert [part["begun"] for part in parts] == [whole, whole]
    assert [part["state"] for part in parts] == [part["state"] for part in straight]
    assert steps_in(tmp_path) == ["step-5"] and (root / "latest").read_text() == "step-5\n"
    assert sorted(path.name for path in root.iterdir()) == ["latest", "step-5"], "nothing is left over"


LONG = [*TINY, "--checkpoint.enable", "--checkpoint.interval=4", "--checkpoint.async_mode=async"]
LONG += ["--metrics.log_freq=1", "--training.steps=100000"]


def wait_for(path: Path, process) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)


def test_a_stopped_run_says_what_is_saved_resumes_and_knows_when_it_is_done(tmp_path):
    process = start(LONG, tmp_path, NGPU="2")
    wait_for(tmp_path / "checkpoint/step-8", process)
    process.send_signal(signal.SIGINT)
    code, out = finish(process)
    assert code == 130 and re.search(r"stopped at step \d+ of 100000; .*saved: .*/checkpoint/step-\d+$", out.rstrip())
    newest = int(re.search(r"step-(\d+)$", out.rstrip())[1])

    target = newest + 3
    argv = [*LONG, f"--training.steps={target}", "--lr_scheduler.total_steps=100000"]
    code, out = train(argv, tmp_path, NGPU="1")
    assert code == 0 and f"resumed step {newest} from" in out and "titanlite: resuming from the newest of" in out
    assert out.index("titanlite: resuming") < out.index("resumed step") < out.index(f"step: {target:2}")
    steps = [r["step"] for r in records(tmp_path) if "loss" in r]
    assert steps == list(range(1, target + 1)), "no step twice"

    code, out = train(argv, tmp_path, NGPU="2")
    assert code == 0
    assert out == (
        f"titanlite: already at step {target} of {target}: raise --training.steps, or give --job.dump_folder\n"
    )
