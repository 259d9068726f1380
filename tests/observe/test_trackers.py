"""Trackers of experiments: each gets one run over resumes, its config and its end, and none can
stop or slow training.
"""

import json
import re
import sqlite3
import sys
import threading
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.saved import keeping_log
from tests.jobs import TINY, job, run_to_end
from tests.observe.test_sinks import OFFLINE, wandb_points, wandb_records
from titanlite.cli import main
from titanlite.errors import UserError
from titanlite.observe import trackers
from titanlite.registry import SinkSpec, get_sink, register_sink

STEPS = {1: 4.5, 2: 4.0, 3: 3.5, 4: 3.0}
"""Losses by step; the run is stopped after step 2 and resumed."""


def in_mlflow(folder: Path) -> tuple[list[str], dict[int, float], str, str]:
    """Return the ids of the runs, their losses by step, a key of the config, and the state."""
    runs = [path.parent for path in folder.glob("mlruns/*/*/params")]
    text = (runs[0] / "metrics/loss_metrics/global_avg_loss").read_text()
    losses = {int(step): float(loss) for _, loss, step in map(str.split, text.splitlines())}
    key = (runs[0] / "params/training.seq_len").read_text()
    assert "status: 3" in (runs[0] / "meta.yaml").read_text(), "finished"
    assert (runs[0] / "metrics/mfu").exists(), "a name without what MLflow refuses"
    return [run.name for run in runs], losses, key, (runs[0] / "tags/state").read_text()


def in_trackio(folder: Path) -> tuple[list[str], dict[int, float], str, str]:
    (file,) = folder.glob("trackio/titanlite.db")
    with sqlite3.connect(file) as database:
        rows = database.execute("select run_name, step, metrics from metrics").fetchall()
        (config,) = database.execute("select config from configs").fetchone()
    records = [(name, step, json.loads(metrics)) for name, step, metrics in rows]
    tag = "loss_metrics/global_avg_loss"
    losses = {step: numbers[tag] for _, step, numbers in records if tag in numbers}
    states = [numbers["state"] for _, _, numbers in records if "state" in numbers]
    key = f"{json.loads(config)['training.seq_len']}"
    return sorted({name for name, _, _ in records}), losses, key, states[-1]


def in_comet(folder: Path) -> tuple[list[str], dict[int, float], str, str]:
    files = sorted(folder.glob("comet/*.zip"), key=lambda file: file.stat().st_mtime)
    lines = [
        json.loads(line)
        for file in files
        for line in zipfile.ZipFile(file).read("messages.json").splitlines()
    ]
    of = {kind: [x["payload"] for x in lines if x["type"] == kind] for kind in
          ("metric_msg", "parameter_msg", "log_other")}  # fmt: skip
    points = [x["metric"] | x for x in of["metric_msg"]]
    losses = {
        x["step"]: x["metricValue"]
        for x in points
        if x["metricName"] == "loss_metrics/global_avg_loss"
    }
    params = {
        x["paramName"]: x["paramValue"]
        for x in (p.get("param", {}) for p in of["parameter_msg"])
        if x
    }
    states = [x["value"] for x in of["log_other"] if x["key"] == "state"]
    keys = {file.name.partition("-")[0] for file in files}
    return [*keys], losses, f"{params['training.seq_len']}", states[-1]


def in_wandb(folder: Path) -> tuple[list[str], dict[int, float], str, str]:
    ids, losses, key, state = set(), {}, "", ""
    for run in sorted(folder.glob("wandb/offline-run-*")):
        records = wandb_records(folder, run.name)
        points = wandb_points(records)
        losses |= points["loss_metrics/global_avg_loss"]
        assert points["late"], "W&B drops records of an earlier step"
        for record in records:
            kind = record.WhichOneof("record_type")
            if kind == "run":
                ids.add(record.run.run_id)
                config = {
                    item.key: json.loads(item.value_json) for item in record.run.config.update
                }
                key = f"{config['training']['seq_len']}"
            if kind == "summary":
                found = {item.key: item.value_json for item in record.summary.update}
                state = json.loads(found.get("state", json.dumps(state)))
    return [*ids], losses, key, state


READERS: dict[str, Callable[[Path], tuple[list[str], dict[int, float], str, str]]] = {
    "mlflow": in_mlflow,
    "trackio": in_trackio,
    "comet": in_comet,
    "wandb": in_wandb,
}


@pytest.fixture
def offline(tmp_path, monkeypatch) -> Path:
    settings = {"COMET_START_ONLINE": "0", "TRACKIO_DIR": f"{tmp_path}/trackio"}
    for name, value in (OFFLINE | settings).items():
        monkeypatch.setenv(name, value)
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_ALLOW_FILE_STORE", "COMET_OFFLINE_DIRECTORY"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    return tmp_path


def opened(folder: Path, *argv: str, after: int = 0) -> tuple[Any, list[str]]:
    """Return the trackers of a run, and the lines of its log."""
    log, lines = keeping_log()
    argv = (*TINY, f"--job.dump_folder={folder}", "--training.steps=4", *argv)
    return trackers.open_trackers(job(list(argv), world=1).config, log, after), lines


@pytest.mark.parametrize("name", READERS)
def test_a_tracker_has_one_run_over_resumes_with_its_config_and_its_end(offline, name):
    package = get_sink(name).package
    if find_spec(package) is None:
        pytest.skip(f"the package {package} is not installed")
    for after in (0, 2):
        (sink,), lines = opened(offline, f'--metrics.sinks=["{name}"]', after=after)
        for step in (after + 1, after + 2):
            tags = {"loss_metrics/global_avg_loss": STEPS[step], "mfu(%)": 1.0}
            sink.write(step, tags)
        sink.write(after + 1, {"late": 1.0})  # of a save that took long
        sink.close()
        assert lines == []
    ids, losses, key, state = READERS[name](offline)
    assert len(ids) == 1 and losses == STEPS and key == "16" and state == "finished"


def test_the_end_is_finished_at_the_last_step_stopped_before_it_and_failed_after_an_error(tmp_path):
    ends: list[dict[str, Any]] = []
    register_sink(SinkSpec("ends", "tests.observe.test_trackers:keeping"))
    keeping.ends = ends  # type: ignore[attr-defined]
    for last, failed in ((4, False), (3, False), (4, True)):
        (sink,), _ = opened(tmp_path, '--metrics.sinks=["ends"]')
        sink.write(last, {})
        sink.write(last, {})
        sink.write(last - 1, {})  # a save that ends later
        sink.close("failed" * failed)
    assert ends == [
        {"state": state, "last_step": last}
        for state, last in (("finished", 4), ("stopped", 3), ("failed", 4))
    ]


def keeping(config: dict[str, Any], run_id: str) -> trackers.Tracker:
    assert re.fullmatch("[0-9a-f]{32}", run_id) and config["training.steps"] == 4
    return lambda tags, step: None, keeping.ends.append, str  # type: ignore[attr-defined]


OVER = threading.Event()
"""What the trackers below wait for: the end of the run."""


def asleep(config: dict[str, Any], run_id: str) -> trackers.Tracker:
    OVER.wait()
    raise AssertionError("woken")


def drowsy(config: dict[str, Any], run_id: str) -> trackers.Tracker:
    return lambda tags, step: OVER.wait(), str, str


def failing(config: dict[str, Any], run_id: str) -> trackers.Tracker:
    def fail(*arguments: Any, step: int = 0) -> None:
        raise ConnectionError("no route to host")

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
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["step"] == 5
    said = [line for line in log if line.startswith("sink ")]
    assert said.count("sink failing: ConnectionError('no route to host'); training continues") == 1
    for name in ("asleep", "drowsy"):
        assert f"sink {name}: no answer; the last records may be lost" in said


def test_a_tracker_that_cannot_start_ends_a_run_that_begins_but_none_that_goes_on(tmp_path):
    register_sink(SinkSpec("unable", f"{__name__}:unable", offline="KEY=none"))
    sinks = '--metrics.sinks=["unable"]'
    says = "^the sink unable can't start: no key; without a network: KEY=none$"
    with pytest.raises(UserError, match=says):
        opened(tmp_path, sinks)
    (sink,), lines = opened(tmp_path, sinks, after=2)
    for step in (3, 4):
        sink.write(step, {})
    sink.close()
    assert len(lines) == 1 and "PermissionError" in lines[0]


def test_a_package_registers_its_own_tracker(tmp_path, monkeypatch):
    """The one of docs/extending.md, named by model.package, as models are."""
    page = (Path(__file__).parents[2] / "docs/extending.md").read_text()
    for name, code in re.findall(r"```python\n# (notes/\S+)\n(.*?)```", page, re.DOTALL):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    (sink,), lines = opened(tmp_path, "--model.package=notes", '--metrics.sinks=["notes"]')
    sink.write(3, {"lr": 0.5})
    sink.close()
    ids, *rest = zip(*map(read_note, (tmp_path / "notes.jsonl").open()), strict=True)
    assert ids == ((tmp_path / "run_id").read_text(),) * 2 and lines == []
    assert rest == [(3, None), ({"lr": 0.5}, {"state": "stopped", "last_step": 3})]


def read_note(line: str) -> tuple[str, int, dict[str, Any]]:
    values = json.loads(line)
    return values.pop("run"), values.pop("step"), values


def test_an_unknown_tracker_and_a_missing_package_are_one_line(monkeypatch, capsys):
    assert main(["config", '--metrics.sinks=["comett"]']) == 2
    said = capsys.readouterr().err
    assert 'no sink is registered as "comett"; did you mean comet?' in said
    monkeypatch.setitem(sys.modules, "trackio", None)
    config = job([*TINY, '--metrics.sinks=["trackio"]'], world=1).config
    says = '^metrics.sinks = "trackio": the package trackio is not installed; .* install trackio, '
    with pytest.raises(UserError, match=says):
        trackers.require_sinks(config)
