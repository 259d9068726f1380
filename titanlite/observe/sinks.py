"""What a run records: metrics.jsonl always, TensorBoard if enabled, and the line on the console.
trackers.py has the sinks of other packages.
"""

import json
import math
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from io import FileIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

Values = dict[str, Any]  # numbers, or None, by the keys of metrics.jsonl


@dataclass(frozen=True)
class StepRecord:
    """One logged step. The fields are the keys of its line in metrics.jsonl, documented in
    docs/observing.md.
    """

    step: int
    loss: float
    max_loss: float
    grad_norm: float
    lr: float
    tokens: int
    tps: float
    tflops: float
    mfu: float | None
    step_seconds: float
    step_seconds_p50: float
    step_seconds_p95: float
    data_seconds: float
    memory_gib: float
    recompiles: int
    eta_seconds: float | None = None

    @property
    def data_percent(self) -> float:
        """Percentage of the step's time spent waiting for data."""
        return 100 * self.data_seconds / self.step_seconds

    def line(self, steps: int, memory_percent: float) -> str:
        """Return the console's line, whose first fields parsers rely on. `steps` is the target for
        the eta.
        """
        mfu = "n/a" if self.mfu is None else f"{self.mfu:.2f}%"
        left = self.eta_seconds
        if left is None:
            left = (steps - self.step) * self.step_seconds
        eta = format_duration(left)
        return (
            f"step: {self.step:2}  loss: {self.loss:8.5f}  grad_norm: {self.grad_norm:7.4f}  "
            f"memory: {self.memory_gib:5.2f}GiB({memory_percent:.2f}%)  tps: {round(self.tps):,}  "
            f"tflops: {self.tflops:,.2f}  mfu: {mfu}  eta: {eta}  data: {self.data_percent:.1f}%"
        )

    def tags(self) -> Values:
        """Return the values under TorchTitan's names, for existing dashboards."""
        tags = {
            "loss_metrics/global_avg_loss": self.loss,
            "loss_metrics/global_max_loss": self.max_loss,
            "grad_norm": self.grad_norm,
            "lr": self.lr,
            "n_tokens_seen": self.tokens,
            "throughput(tps)": self.tps,
            "tflops": self.tflops,
            "time_metrics/end_to_end(s)": self.step_seconds,
            "time_metrics/p50(s)": self.step_seconds_p50,
            "time_metrics/p95(s)": self.step_seconds_p95,
            "time_metrics/data_loading(s)": self.data_seconds,
            "time_metrics/data_loading(%)": self.data_percent,
            "recompiles": self.recompiles,
        }
        if self.mfu is None:
            return tags
        return {**tags, "mfu(%)": self.mfu}


class JsonLines:
    """metrics.jsonl: one object per line, with floats in full precision and null for values that
    are not finite.

    A sink records the numbers of a step, named as in metrics.jsonl (`values`) or as in TensorBoard
    (`tags`). A file drops existing records of steps later than `after`.
    """

    def __init__(self, path: Path, after: int = 0) -> None:
        if path.exists():
            _drop_later(path, after)
        self._file = path.open("ab", buffering=0)
        self.close = self._file.close

    def write(self, step: int, values: Values, tags: Values) -> None:
        finite = {}
        for key, value in values.items():
            finite[key] = value
            if value is not None and not math.isfinite(value):
                finite[key] = None
        record = {"step": step, **finite, "time": round(time.time(), 3)}
        _append(self._file, (json.dumps(record) + "\n").encode())


class TensorBoard:
    """TensorBoard's event files. torch's SummaryWriter is not used: its thread does not survive a
    full disk.
    """

    def __init__(self, folder: Path, after: int) -> None:
        # This import takes a quarter of a second.
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / f"events.out.tfevents.{time.time_ns()}").open("ab", buffering=0)
        self._records = RecordWriter(SimpleNamespace(write=partial(_append, file)))
        self.close = file.close
        # A type checker would not find this name.
        self._event = import_module("tensorboard.compat.proto.event_pb2").Event
        self._add(file_version="brain.Event:2")
        if after:
            self._add(step=after + 1, session_log={"status": "START"})  # drops later records

    def write(self, step: int, values: Values, tags: Values) -> None:
        scalars = [{"tag": tag, "simple_value": value} for tag, value in tags.items()]
        self._add(step=step, summary={"value": scalars})

    def _add(self, **fields: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **fields).SerializeToString())


def _append(file: FileIO, record: bytes) -> None:
    """Write a record immediately, since a run may be killed; leave nothing of it if the disk is
    full.
    """
    end = file.seek(0, os.SEEK_END)
    rest = record
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError as error:
        file.truncate(end)
        raise OSError(error.errno, error.strerror, str(file.name)) from error


def _drop_later(path: Path, after: int) -> None:
    """Remove from metrics.jsonl the steps later than `after`, and an incomplete line left by a
    killed run.
    """
    end = 0
    late = b""
    is_cut = False
    with path.open("rb") as file, suppress(ValueError, KeyError, TypeError):
        for line in file:
            is_later = json.loads(line)["step"] > after or not line.endswith(b"\n")
            is_cut |= is_later
            if not is_cut:
                end += len(line)
            elif not is_later:  # such as the record of a save, which ended some steps later
                late += line
    os.truncate(path, end)
    with path.open("ab") as file:
        file.write(late)


def format_duration(seconds: float) -> str:
    """Return seconds as 1:02:03, 2:03 or 0:03."""
    minutes, seconds = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{seconds:02}"
    return f"{minutes}:{seconds:02}"
