"""`titanlite train --sweep`: one run after another, each in a folder of its own."""

from __future__ import annotations

import signal
import time
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.jobs import TINY
from tests.runs import finish, records, start, train
from titanlite.checkpoint.manifest import latest_complete
from titanlite.cli import main
from titanlite.config.load import load, parse_command_line
from titanlite.errors import command_line
from titanlite.launch.sweep import sweep

STEPS = 600
SWEEP = [word for word in TINY if word != "--checkpoint.no_enable"]
SWEEP += [f"--training.steps={STEPS}", "--sweep=optimizer.lr=1e-3,2e-3", "--metrics.log_freq=20"]


@pytest.mark.parametrize(
    ("setting", "why"),
    {
        "optimizer.lr": "--sweep optimizer.lr: give a key and values, as in optimizer.lr=1e-3,4e-3",
        "=1,2": "--sweep =1,2: give a key and values",
        "job.dump_folder=a,b": "each run of a sweep has a folder of its own already",
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


def test_a_sweep_has_one_key(tmp_path, capsys):
    two = ["--sweep=training.steps=1,2", "--sweep", "optimizer.lr=1e-3,2e-3"]
    assert main(["train", *TINY, f"--job.dump_folder={tmp_path}/outputs", *two]) == 2
    both = "--sweep training.steps=1,2 --sweep optimizer.lr=1e-3,2e-3: a sweep has one key"
    assert both in capsys.readouterr().err


def compare(folder: Path) -> str:
    plot = command_line("titanlite", "plot")
    return f"{plot} {folder}/optimizer.lr=* --by optimizer.lr"


def test_runs_of_a_sweep_have_names_and_a_command_that_compares_them(tmp_path):
    runs, command = sweep([f"--job.dump_folder={tmp_path}"], ["optimizer.lr=1e-3,2e-3"])
    assert [*runs] == ["optimizer.lr = 1e-3", "optimizer.lr = 2e-3"]
    assert command == compare(tmp_path)
    for words in runs.values():
        folder = words[-1].removeprefix("--job.dump_folder=")
        assert fnmatch(folder, command.split()[-3]), "the command's pattern matches it"


@pytest.mark.parametrize(
    ("given", "setting", "seeds"),
    [
        ([], "optimizer.lr=1e-3,2e-3", {0}),
        (["--debug.seed=3"], "optimizer.lr=1e-3,2e-3", {3}),
        ([], "debug.seed=1,2", {1, 2}),
    ],
)
def test_runs_of_a_sweep_differ_in_its_key_alone(given, setting, seeds, tmp_path):
    config = tmp_path / "mine.toml"
    config.write_text("")  # debug.toml has a seed
    argv = ["--config", str(config), *given, f"--job.dump_folder={tmp_path}"]
    runs, _ = sweep(argv, [setting])
    configs = [load(parse_command_line(words, {})).config for words in runs.values()]
    assert {config.debug.seed for config in configs} == seeds


@pytest.mark.exhaustive
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
    assert "titanlite: run 2 of 2: optimizer.lr = 2e-3\n" in out and "to compare" not in out
    code, out = train(SWEEP, tmp_path, NGPU="1")
    assert f"titanlite: to compare them: {compare(tmp_path)}\n" in out
    assert code == 0 and out.count(f"already at step {STEPS}") == 1, out
    for folder, lr in ((first, 1e-3), (second, 2e-3)):
        assert latest_complete(folder / "checkpoint") == STEPS
        assert max(record.get("lr", 0) for record in records(folder)) == pytest.approx(lr)
