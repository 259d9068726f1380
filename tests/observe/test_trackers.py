"""Trackers of experiments: each gets one run over resumes, its config and its end, and none can
stop or slow training.
"""

from __future__ import annotations

import json
import re
import sys
import threading
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from tests.jobs import TINY, job, keeping_log, run_to_end
from tests.messages import refused, says
from tests.runs import losses, write_example
from titanlite.observe import trackers
from titanlite.observe.run_folder import RUN_ID
from titanlite.registry import SinkSpec, get_sink, register_sink


def opened(folder: Path, name: str, *argv: str, after: int = 0) -> tuple[Any, list[str]]:
    """Return the one tracker of a run of four steps, and the lines of its log."""
    log, lines = keeping_log()
    argv = (*TINY, f"--job.dump_folder={folder}", "--training.steps=4", *argv)
    config = job([*argv, f'--metrics.sinks=["{name}"]'], world=1).config
    (sink,) = trackers.open_trackers(config, log, after)
    return sink, lines


@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_a_package_gets_the_run_s_id_its_config_its_numbers_and_its_end(
    tmp_path, monkeypatch, name
):
    """By the calls that it gets; of these, W&B alone is installed here, and test_sinks.py reads
    what it writes.
    """
    package = get_sink(name).package
    library = MagicMock(__spec__=ModuleSpec(package, None, origin="here"))
    library.active_run.return_value = None
    monkeypatch.setitem(sys.modules, package, library)
    for variable in ("MLFLOW_TRACKING_URI", "MLFLOW_ALLOW_FILE_STORE"):
        monkeypatch.setenv(variable, "a place of the user")
    sink, lines = opened(tmp_path, name)
    sink.write(4, {"loss": 4.25})
    sink.close()
    assert lines == []
    calls = f"{library.mock_calls}"
    config = "training.seq_len" if name != "wandb" else "'seq_len'"
    says(calls, (tmp_path / RUN_ID).read_text(), config, "4.25", "'state': 'finished'")


seen: list[Any] = []


def keeping(config: dict[str, Any], run_id: str) -> trackers.Tracker:
    assert re.fullmatch("[0-9a-f]{32}", run_id) and config["training.steps"] == 4
    return lambda tags, step: seen.append(step), seen.append, str


@pytest.mark.parametrize(
    ("last", "error", "state"),
    [(4, "", "finished"), (3, "", "stopped"), (4, "failed", "failed")],
)
def test_the_end_is_finished_at_the_last_step_stopped_before_it_and_failed_after_an_error(
    tmp_path, last, error, state
):
    """No tracker gets an earlier step after a later one, which W&B would drop."""
    register_sink(SinkSpec("keeping", f"{__name__}:keeping"))
    seen.clear()
    sink, _ = opened(tmp_path, "keeping")
    sink.write(last, {})
    sink.write(last - 1, {})  # a save that ends later
    sink.close(error)
    assert seen == [last, last, {"state": state, "last_step": last}]


OVER = threading.Event()
"""What the trackers below wait for: the end of the run."""


def asleep(config: dict[str, Any], run_id: str) -> trackers.Tracker:
    OVER.wait()
    raise AssertionError("woken")


def drowsy(config: dict[str, Any], run_id: str) -> trackers.Tracker:
    return lambda tags, step: OVER.wait(), str, str


def failing(config: dict[str, Any], run_id: str) -> trackers.Tracker:
    def fail(*arguments: Any, step: int = 0) -> None:
        raise ConnectionError("no route")

    return fail, fail, fail


def unable(config: dict[str, Any], run_id: str) -> trackers.Tracker:
    raise PermissionError("no key\nat all")


def run_beside_bad_trackers(folder: str) -> list[str]:
    """Train to the last step while trackers sleep and fail; return the run's log."""
    OVER.clear()
    for build in (asleep, drowsy, failing):
        register_sink(SinkSpec(build.__name__, f"{__name__}:{build.__name__}"))
    argv = [*TINY, "--training.steps=5", '--metrics.sinks=["asleep", "drowsy", "failing"]']
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trackers, "START_SECONDS", 0)
        patch.setattr(trackers, "END_SECONDS", {"finished": 0})
        try:
            return run_to_end(argv, folder)["log"]
        finally:
            OVER.set()


def test_trackers_that_sleep_or_fail_neither_stop_nor_slow_training(pool, tmp_path):
    """The run ends while two trackers still sleep, one before it starts and one in the first
    record.
    """
    (log,) = pool.run(run_beside_bad_trackers, str(tmp_path), world=1)
    assert max(losses(tmp_path)) == 5
    for name, why in (("failing", "no route"), ("asleep", "no answer"), ("drowsy", "no answer")):
        said = [line for line in log if line.startswith(f"sink {name}: ") and why in line]
        assert len(said) == 1, log


def test_a_tracker_that_cannot_start_ends_a_run_that_begins_but_none_that_goes_on(tmp_path):
    register_sink(SinkSpec("unable", f"{__name__}:unable", offline="KEY=none"))
    with refused("unable", "no key;", "KEY=none"):
        opened(tmp_path, "unable")
    sink, lines = opened(tmp_path, "unable", after=2)
    for step in (3, 4):
        sink.write(step, {})
    sink.close()
    assert len(lines) == 1 and "PermissionError" in lines[0]


def test_a_package_registers_its_own_tracker(tmp_path, monkeypatch):
    """The one of docs/extending.md, named by model.package, as models are."""
    write_example("notes", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    sink, lines = opened(tmp_path, "notes", "--model.package=notes")
    sink.write(3, {"lr": 0.5})
    sink.close()
    assert lines == []
    run = {"run": (tmp_path / RUN_ID).read_text()}
    assert [json.loads(line) for line in (tmp_path / "notes.jsonl").open()] == [
        run | {"step": 3, "lr": 0.5},
        run | {"step": None, "state": "stopped", "last_step": 3},
    ]
