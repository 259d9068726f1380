"""`titanlite train --sweep`: one run after another, each in a folder of its own."""

from __future__ import annotations

import signal
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.jobs import TINY
from tests.messages import says
from tests.runs import finish, records, run, start, wait_for
from titanlite.checkpoint.manifest import latest_complete
from titanlite.config.load import load, parse_command_line
from titanlite.errors import STOPPED, command_line
from titanlite.launch.sweep import sweep

STEPS = 300
SWEEP = [word for word in TINY if word != "--checkpoint.no_enable"]
SWEEP += [f"--training.steps={STEPS}", "--sweep=optimizer.lr=1e-3,2e-3", "--metrics.log_freq=20"]


def compare(folder: Path) -> str:
    plot = command_line("titanlite", "plot")
    return f"{plot} {folder}/optimizer.lr=*"


def test_runs_of_a_sweep_have_names_and_a_command_that_compares_them(tmp_path):
    runs, command = sweep([f"--job.dump_folder={tmp_path}"], ["optimizer.lr=1e-3,2e-3"])
    assert [*runs] == ["optimizer.lr = 1e-3", "optimizer.lr = 2e-3"]
    assert command == compare(tmp_path)
    for words in runs.values():
        folder = words[-1].removeprefix("--job.dump_folder=")
        assert fnmatch(folder, command.split()[-1]), "the command's pattern matches it"


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


@pytest.mark.long
def test_a_sweep_that_was_stopped_goes_on_with_the_run_that_was_not_done(tmp_path):
    first, second = (tmp_path / f"optimizer.lr={value}" for value in ("1e-3", "2e-3"))
    process = start(SWEEP, tmp_path, NGPU="1")
    wait_for(second / "metrics.jsonl", process)
    assert latest_complete(first / "checkpoint") == STEPS, "the first run had been done"
    process.send_signal(signal.SIGTERM)
    code, out = finish(process)
    assert code == STOPPED and compare(tmp_path) not in out, out
    says(out, "run 2 of 2: optimizer.lr = 2e-3\n")
    out = run(SWEEP, tmp_path).out
    says(out, compare(tmp_path))
    assert out.count(f"already at step {STEPS}") == 1, out
    for folder, lr in ((first, 1e-3), (second, 2e-3)):
        assert latest_complete(folder / "checkpoint") == STEPS
        assert max(record.get("lr", 0) for record in records(folder)) == pytest.approx(lr)
