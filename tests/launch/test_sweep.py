"""`titanlite train --sweep`: one run after another, each in a folder of its own."""

from __future__ import annotations

import signal
import time

import pytest

from tests.jobs import TINY
from tests.launch.run import finish, records, start, train
from titanlite.checkpoint.manifest import latest_complete
from titanlite.cli import main

STEPS = 600
SWEEP = [word for word in TINY if word != "--checkpoint.no_enable"]
SWEEP += [f"--training.steps={STEPS}", "--sweep=optimizer.lr=1e-3,2e-3", "--metrics.log_freq=20"]


@pytest.mark.parametrize(
    ("setting", "why"),
    {
        "optimizer.lr": "--sweep optimizer.lr: give values, as in optimizer.lr=1e-3,4e-3",
        "optimizer.lr=1e-3,x": 'optimizer.lr = "x"',
        "optimizer.lrr=1": "did you mean optimizer.lr?",
        "training.local_batch_size=1,0": "training.local_batch_size = 0",
    }.items(),
)
def test_all_values_are_checked_before_the_first_run_starts(
    setting, why, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("NGPU", "1")
    folder = tmp_path / "outputs"
    assert main(["train", *TINY, f"--job.dump_folder={folder}", "--sweep", setting]) == 2
    assert why in capsys.readouterr().err and not folder.exists()


@pytest.mark.long
def test_a_sweep_that_was_stopped_goes_on_with_the_run_that_was_not_done(tmp_path):
    first, second = (tmp_path / f"optimizer.lr={value}" for value in ("1e-3", "2e-3"))
    process = start(SWEEP, tmp_path, NGPU="1")
    while not (second / "metrics.jsonl").exists():
        assert process.poll() is None
        time.sleep(0.05)
    assert latest_complete(first / "checkpoint") == STEPS, "the first run had been done"
    process.send_signal(signal.SIGTERM)
    code, out = finish(process)
    assert code == 75, out
    code, out = train(SWEEP, tmp_path, NGPU="1")
    assert code == 0 and out.count(f"already at step {STEPS}") == 1, out
    for folder, lr in ((first, 1e-3), (second, 2e-3)):
        assert latest_complete(folder / "checkpoint") == STEPS
        assert max(record.get("lr", 0) for record in records(folder)) == pytest.approx(lr)
