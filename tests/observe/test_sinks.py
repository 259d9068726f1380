"""Sinks: any set of them works together, and each gets every record."""

import json
import math
import os
import re
import resource
import struct
import sys
import time
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.checkpoint.saved import keeping_log
from tests.jobs import TINY, job, run_to_end
from tests.runs import finish, start, train
from titanlite.errors import RunFailed, UserError
from titanlite.observe.metrics import JsonLines, TensorBoard
from titanlite.observe.trackers import require_sinks
from titanlite.train.report import Report

needs_wandb = pytest.mark.skipif(
    find_spec("wandb") is None, reason="the package wandb is not installed"
)

Points = dict[str, dict[int, float]]
"""Values by tag and step."""

OFFLINE = {
    "WANDB_MODE": "offline",
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_CONSOLE": "off",
    "WANDB_SILENT": "true",
}
OFFLINE["WANDB__SERVICE_WAIT"] = (
    "300"  # its own process starts slowly on a busy machine; the default is 30 s
)


def run_offline(argv: list[str], folder: str, **environ: str) -> None:
    saved = dict(os.environ)
    os.environ.update(OFFLINE | environ)
    try:
        run_to_end(argv, folder)
    finally:
        os.environ.clear()
        os.environ.update(saved)


def tensorboard(folder: Path) -> Points:
    events = EventAccumulator(str(folder))
    events.Reload()
    points = {tag: events.Scalars(tag) for tag in events.scalars.Keys()}
    assert all(len({each.step for each in found}) == len(found) for found in points.values()), (
        "a step twice"
    )
    return {tag: {each.step: each.value for each in found} for tag, found in points.items()}


def wandb_records(folder: Path, run: str = "offline-run-*") -> list[Any]:
    """Return what W&B wrote offline, to the record of the run's end: a process of its own writes
    on when the run has ended.
    """
    (path,) = folder.glob(f"wandb/{run}/*.wandb")
    deadline = time.monotonic() + 300
    while True:
        records = _whole_records(path)
        if any(record.WhichOneof("record_type") == "exit" for record in records):
            return records
        assert time.monotonic() < deadline, f"{path} has no end"
        time.sleep(0.1)


def _whole_records(path: Path) -> list[Any]:
    """Read protobuf records in LevelDB's log format of 32 KiB blocks."""
    from wandb.proto import wandb_internal_pb2

    data, position, payload, records = path.read_bytes(), 7, b"", []
    while position + 7 <= len(data):
        if position % 32768 > 32768 - 7:  # no room for a header: the rest of the block is padding
            position += -position % 32768
            continue
        size, kind = struct.unpack("<4xHB", data[position : position + 7])
        if position + 7 + size > len(data):  # not written to its end yet
            break
        payload += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # a full record, or its last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(payload)
            records.append(record)
            payload = b""
    return records


def wandb_points(records: list[Any]) -> Points:
    points: Points = defaultdict(dict)
    for record in records:
        if record.WhichOneof("record_type") == "history":
            row = {
                "/".join(item.nested_key) or item.key: json.loads(item.value_json)
                for item in record.history.item
            }
            for tag, value in row.items():
                if not tag.startswith("_"):
                    points[tag][row["_step"]] = value
    return points


def test_metrics_jsonl_is_json_also_for_a_step_that_is_not_finite(tmp_path):
    sink = JsonLines(tmp_path / "metrics.jsonl")
    sink.write(
        3, {"loss": math.nan, "max_loss": -math.inf, "mfu": None, "lr": 0.1, "tokens": 5}, {}
    )
    sink.close()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    record = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert record == {
        "step": 3,
        "loss": None,
        "max_loss": None,
        "mfu": None,
        "lr": 0.1,
        "tokens": 5,
    }
    JsonLines(tmp_path / "metrics.jsonl", after=3).close()
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 1, "a resumed run keeps it"


def test_a_resumed_run_keeps_the_record_of_a_save_that_ended_some_steps_later(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": step, "loss": 1.0} for step in (1, 2, 3)]
    lines.insert(2, {"step": 2, "checkpoint_write_seconds": 1.0})
    lines += [{"step": 2, "of": "a slow tracker"}, {"step": 4, "loss": 1.0}]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"step": 2')
    JsonLines(path, after=2).close()
    kept = [line for line in lines if line["step"] <= 2]
    assert [json.loads(line) for line in path.read_text().splitlines()] == kept


@pytest.mark.parametrize("sink_class", [JsonLines, TensorBoard])
def test_after_a_record_without_room_the_next_one_is_whole(tmp_path, sink_class):
    sink = sink_class(tmp_path / "records", 0)
    sink.write(1, {"loss": 1.0}, {"loss": 1.0})
    (file,) = tmp_path.rglob("records*" if sink_class is JsonLines else "*tfevents*")
    size, limits = file.stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (size + 9, limits[1])
    )  # Python ignores the signal; the write is short
    try:
        with pytest.raises(OSError, match=f"File too large: '{file}'"):
            sink.write(2, {"loss": 2.0}, {"loss": 2.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert file.stat().st_size == size
    sink.write(3, {"loss": 3.0}, {"loss": 3.0})
    sink.close()
    if sink_class is JsonLines:
        found = {
            line["step"]: line["loss"] for line in map(json.loads, file.read_text().splitlines())
        }
    else:
        found = tensorboard(tmp_path / "records")["loss"]
    assert found == {1: 1.0, 3: 3.0}


class Full:
    def write(self, *record: object) -> None:
        raise OSError(28, "No space left on device", "metrics.jsonl")


@pytest.mark.parametrize("words", ["no_enable", "enable", "enable --checkpoint.on_failure=warn"])
def test_a_disk_without_room_for_metrics_ends_a_run_only_if_a_failed_save_would(words):
    log, lines = keeping_log()
    config = job([*TINY, *f"--checkpoint.{words}".split()], world=1)
    report = SimpleNamespace(trackers=[], sinks=[Full(), Full()], job=config, log=log)
    says = r"\[Errno 28\] No space left on device: 'metrics.jsonl'"
    if words == "enable":
        with pytest.raises(RunFailed, match=f"^metrics: {says}"):
            Report._write(report, 3, {}, {})  # type: ignore[arg-type]
    else:
        Report._write(report, 3, {}, {})  # type: ignore[arg-type]
        assert len(lines) == 2 and all(
            re.match(f"metrics of step 3 are lost: {says}", line) for line in lines
        )


def test_tensorboard_drops_what_a_resumed_run_repeats(tmp_path):
    for after, steps in ((0, (1, 2, 3, 4)), (2, (3, 5))):
        sink = TensorBoard(tmp_path, after)
        for step in steps:
            sink.write(step, {}, {"loss": after + step / 10, "lr": math.inf})
        sink.close()
    assert tensorboard(tmp_path)["loss"] == pytest.approx({1: 0.1, 2: 0.2, 3: 2.3, 5: 2.5})


@needs_wandb
def test_all_sinks_record_the_same_steps(pool, tmp_path):
    argv = [*TINY, "--training.steps=5", "--metrics.log_freq=2", "--metrics.enable_tensorboard"]
    argv += [
        "--metrics.enable_wandb",
        "--validation.enable",
        "--validation.freq=3",
        "--validation.steps=1",
    ]
    argv += ["--job.description=a run with notes"]
    pool.run(run_offline, argv, str(tmp_path), world=1)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    validated = {
        line["step"]: line["validation_loss"] for line in lines if "validation_loss" in line
    }
    assert list(losses) == [1, 2, 4, 5] and list(validated) == [3, 5]
    records = wandb_records(tmp_path)
    board, run = tensorboard(tmp_path / "tb"), wandb_points(records)
    assert board.keys() == run.keys()
    for points in (board, run):
        assert points["loss_metrics/global_avg_loss"] == pytest.approx(losses)
        assert points["validation_metrics/loss"] == pytest.approx(validated)
        assert points["time_metrics/p95(s)"].keys() == points["recompiles"].keys() == losses.keys()

    (about,) = [record.run for record in records if record.WhichOneof("record_type") == "run"][:1]
    config = {item.key: json.loads(item.value_json) for item in about.config.update}
    assert about.project == "titanlite" and about.notes == "a run with notes"
    assert config["training"]["steps"] == 5 and config["training"]["seq_len"] == 16


@pytest.mark.long
@needs_wandb
def test_wandb_takes_its_project_from_the_environment(pool, tmp_path):
    pool.run(
        run_offline_in, [*TINY, "--metrics.enable_wandb"], str(tmp_path), "my-project", world=2
    )
    runs = [
        record.run
        for record in wandb_records(tmp_path)
        if record.WhichOneof("record_type") == "run"
    ]
    assert runs[0].project == "my-project" and not (tmp_path / "tb").exists()


def run_offline_in(argv: list[str], folder: str, project: str) -> None:
    run_offline(argv, folder, WANDB_PROJECT=project)


@pytest.fixture
def without_wandb(tmp_path) -> dict[str, str]:
    """Return an environment without wandb, which workers inherit."""
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['wandb'] = None\n")
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])}


def test_a_missing_package_is_an_error_before_any_worker_starts(tmp_path, without_wandb):
    out_folder = tmp_path / "out"
    code, out = train([*TINY, "--metrics.enable_wandb"], out_folder, NGPU="1", **without_wandb)
    assert code == 2 and "nothing was started" in out and "Traceback" not in out
    assert 'metrics.sinks = "wandb": ' in out and f"{sys.executable} -m pip install wandb" in out
    assert not out_folder.exists()


@pytest.mark.long
def test_a_missing_package_is_an_error_in_a_worker_without_launcher(tmp_path, without_wandb):
    worker = start(
        [*TINY, "--metrics.enable_wandb"],
        tmp_path / "out",
        module="titanlite.train",
        **without_wandb,
    )
    code, out = finish(worker)
    assert code == 2 and "-m pip install wandb" in out and "Traceback" not in out


def test_a_folder_named_wandb_is_not_the_package(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(UserError, match="pip install .*wandb, or remove"):
        require_sinks(job([*TINY, "--metrics.enable_wandb"], world=1).config)


@pytest.mark.exhaustive
@needs_wandb
def test_a_missing_api_key_is_an_error_without_a_traceback(tmp_path):
    home = {
        "HOME": str(tmp_path),
        "WANDB_MODE": "online",
        "WANDB_API_KEY": "",
        "WANDB_ERROR_REPORTING": "false",
    }
    code, out = train([*TINY, "--metrics.enable_wandb"], tmp_path / "out", NGPU="1", **home)
    assert code == 2 and "Traceback" not in out
    assert (
        "the sink wandb can't start: No API key configured" in out and "WANDB_MODE=offline" in out
    )
