"""Sinks: any set of them works together, and each gets every record."""

from __future__ import annotations

import errno
import json
import math
import os
import struct
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.jobs import TINY, files_of_at_most, job, keeping_log, run_to_end
from tests.messages import refused, says
from tests.runs import losses, records
from titanlite.cli import main
from titanlite.errors import RunFailed
from titanlite.observe.sinks import JsonLines, TensorBoard
from titanlite.observe.trackers import require_sinks
from titanlite.train import worker
from titanlite.train.report import Report

Points = dict[str, dict[int, float]]
"""Values by tag and step."""

OFFLINE = {
    "WANDB_MODE": "offline",
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_CONSOLE": "off",
    "WANDB_SILENT": "true",
    "WANDB_PROJECT": "my-project",
    # Its own process starts slowly on a busy machine; the default is 30 s
    "WANDB__SERVICE_WAIT": "300",
}


def run_offline(argv: list[str], folder: str) -> None:
    with patch.dict(os.environ, OFFLINE):
        run_to_end(argv, folder)


def tensorboard(folder: Path) -> Points:
    events = EventAccumulator(str(folder))
    events.Reload()
    points = {tag: events.Scalars(tag) for tag in events.scalars.Keys()}
    assert all(len({each.step for each in found}) == len(found) for found in points.values()), (
        "a step twice"
    )
    return {tag: {each.step: each.value for each in found} for tag, found in points.items()}


def wandb_records(path: Path) -> list[tuple[str, Any]]:
    """Return what W&B wrote offline, each record with its kind, to that of the run's end: a process
    of its own writes on when the run has ended.
    """
    deadline = time.monotonic() + 300
    while True:
        found = [
            (kind, getattr(record, kind))
            for record in _whole_records(path)
            if (kind := record.WhichOneof("record_type"))
        ]
        if "exit" in dict(found):
            return found
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


def values_of(items: Any) -> dict[str, Any]:
    return {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}


def test_metrics_jsonl_is_json_also_for_a_step_that_is_not_finite(tmp_path):
    sink = JsonLines(tmp_path / "metrics.jsonl")
    sink.write(
        3, {"loss": math.nan, "max_loss": -math.inf, "mfu": None, "lr": 0.1, "tokens": 5}, {}
    )
    sink.close()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    path = tmp_path / "metrics.jsonl"
    record = json.loads(path.read_text(), parse_constant=refuse)
    assert abs(time.time() - record.pop("time")) < 600
    nothing = dict.fromkeys(("loss", "max_loss", "mfu"))
    assert record == {"step": 3, **nothing, "lr": 0.1, "tokens": 5}
    JsonLines(path, after=3).close()
    assert path.read_text().count("\n") == 1, "a resumed run keeps it"


def test_a_resumed_run_keeps_the_record_of_a_save_that_ended_some_steps_later(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": step, "loss": 1.0} for step in (1, 2, 3)]
    lines.insert(2, {"step": 2, "checkpoint_write_seconds": 1.0})
    lines += [{"step": 2, "of": "a slow tracker"}, {"step": 4, "loss": 1.0}]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"step": 2')
    JsonLines(path, after=2).close()
    kept = [line for line in lines if line["step"] <= 2]
    assert [json.loads(line) for line in path.read_text().splitlines()] == kept


@pytest.mark.parametrize(
    ("sink_class", "pattern", "read"),
    [
        (JsonLines, "metrics.jsonl", losses),
        (TensorBoard, "*tfevents*", lambda folder: tensorboard(folder)["loss"]),
    ],
)
def test_after_a_record_without_room_the_next_one_is_whole(
    tmp_path, sink_class, pattern, read: Callable[[Path], dict[int, float]]
):
    sink = sink_class(tmp_path / ("metrics.jsonl" if sink_class is JsonLines else ""), 0)
    sink.write(1, {"loss": 1.0}, {"loss": 1.0})
    (file,) = tmp_path.glob(pattern)
    size = file.stat().st_size
    too_large = refused(os.strerror(errno.EFBIG), f"'{file}'", kind=OSError)
    with files_of_at_most(size + 9), too_large:  # the write is short
        sink.write(2, {"loss": 2.0}, {"loss": 2.0})
    assert file.stat().st_size == size
    sink.write(3, {"loss": 3.0}, {"loss": 3.0})
    sink.close()
    assert read(tmp_path) == {1: 1.0, 3: 3.0}


class Full:
    def write(self, *record: object) -> None:
        raise OSError(errno.ENOSPC, "No space", "metrics.jsonl")


@pytest.mark.parametrize("words", ["no_enable", "enable", "enable --checkpoint.on_failure=warn"])
def test_a_disk_without_room_for_metrics_ends_a_run_only_if_a_failed_save_would(words):
    log, lines = keeping_log()
    config = job([*TINY, *f"--checkpoint.{words}".split()], world=1)
    report: Any = SimpleNamespace(trackers=[], sinks=[Full(), Full()], job=config, log=log)
    named = "metrics", "[Errno 28]", "'metrics.jsonl'"
    if words == "enable":
        with refused(*named, kind=RunFailed):
            Report._write(report, 3, {}, {})
    else:
        Report._write(report, 3, {}, {})
        assert len(lines) == 2
        for line in lines:
            says(line, "step 3 ", *named)


@pytest.mark.long
@pytest.mark.skipif(not find_spec("wandb"), reason="the package wandb is not installed")
def test_all_sinks_record_the_same_steps_of_one_run_over_a_resume(pool, tmp_path):
    argv = [*TINY, "--metrics.log_freq=1", "--metrics.enable_tensorboard", "--checkpoint.enable"]
    argv += ["--metrics.enable_wandb", "--job.description=of notes", "--validation.enable"]
    argv += ["--validation.freq=3", "--validation.steps=1"]
    for steps in (2, 5):
        pool.run(run_offline, [*argv, f"--training.steps={steps}"], str(tmp_path), world=1)
    board, runs = tensorboard(tmp_path / "tb"), []
    points: Points = defaultdict(dict)
    for path in sorted(tmp_path.glob("wandb/offline-run-*/*.wandb")):
        found = wandb_records(path)
        runs.append(next(record for kind, record in found if kind == "run"))
        for row in [values_of(record.item) for kind, record in found if kind == "history"]:
            for tag in row.keys() - {"_step", "_runtime", "_timestamp"}:
                points[tag][row["_step"]] = row[tag]
    lines = records(tmp_path)
    validated = {
        each["step"]: each["validation_loss"] for each in lines if "validation_loss" in each
    }
    assert [*losses(tmp_path)] == [1, 2, 3, 4, 5] and [*validated] == [2, 3, 5]
    assert board.keys() == points.keys()
    for shown in (board, points):
        assert shown["loss_metrics/global_avg_loss"] == pytest.approx(losses(tmp_path))
        assert shown["validation_metrics/loss"] == pytest.approx(validated)
        assert {*shown["time_metrics/p95(s)"]} == {*shown["recompiles"]} == {1, 2, 3, 4, 5}
    assert len({run.run_id for run in runs}) == 1
    assert (runs[0].project, runs[0].notes) == ("my-project", "of notes")


@pytest.mark.parametrize("start", [lambda argv: main(["train", *argv]), worker.main])
def test_a_missing_package_is_an_error_before_any_worker_starts_and_in_one_without_launcher(
    tmp_path, monkeypatch, capfd, start
):
    monkeypatch.setitem(sys.modules, "wandb", None)
    folder = tmp_path / "out"
    assert start([*TINY, "--metrics.enable_wandb", f"--job.dump_folder={folder}"]) == 2
    if dist.is_initialized():  # a worker ends with its group
        dist.destroy_process_group()
    printed = "".join(capfd.readouterr())
    says(printed, 'metrics.sinks = "wandb": ', f"{sys.executable} -m pip install wandb")
    assert "Traceback" not in printed
    assert folder.exists() == (start is worker.main), "a launcher makes it later"


def test_a_folder_named_wandb_is_not_the_package(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with refused('metrics.sinks = "wandb"', "install", "wandb"):
        require_sinks(job([*TINY, "--metrics.enable_wandb"], world=1).config)
