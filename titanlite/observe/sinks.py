"""What a run records: metrics.jsonl always, TensorBoard where enabled; and the line on the console.
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
    """One logged step: the keys of its line in metrics.jsonl, which docs/observing.md explains."""

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
        """Percentage of the step's time that was spent waiting for data."""
        return 100 * self.data_seconds / self.step_seconds

    def line(self, steps: int, memory_percent: float) -> str:
        """Return the console's line; parsers rely on its first fields. `steps` is the target for
        the eta.
        """
        mfu = "n/a" if self.mfu is None else f"{self.mfu:.2f}%"
        left = (steps - self.step) * self.step_seconds
        eta = format_duration(left if self.eta_seconds is None else self.eta_seconds)
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
        return tags if self.mfu is None else {**tags, "mfu(%)": self.mfu}


class JsonLines:
    """metrics.jsonl: one object per line, floats in full precision; null for values that are not
    finite. A sink records numbers of a step, named as there (`values`) or as in TensorBoard
    (`tags`); as a file it drops earlier records after step `after`.
    """

    def __init__(self, path: Path, after: int = 0) -> None:
        if path.exists():
            _drop_later(path, after)
        self._file = path.open("ab", buffering=0)
        self.close = self._file.close

    def write(self, step: int, values: Values, tags: Values) -> None:
        finite = {
            key: None if value is None or not math.isfinite(value) else value
            for key, value in values.items()
        }
        record = {"step": step, **finite, "time": round(time.time(), 3)}
        _append(self._file, (json.dumps(record) + "\n").encode())


class TensorBoard:
    """TensorBoard's event files. torch's SummaryWriter writes in a thread, which a full disk ends
    for good.
    """

    def __init__(self, folder: Path, after: int) -> None:
        # Costs a quarter of a second.
        from tensorboard.summary.writer.record_writer import (
            RecordWriter,
        )

        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / f"events.out.tfevents.{time.time_ns()}").open("ab", buffering=0)
        self._records = RecordWriter(SimpleNamespace(write=partial(_append, file)))
        self.close = file.close
        self._event = import_module(
            "tensorboard.compat.proto.event_pb2"
        ).Event  # a type checker would not find it
        self._add(file_version="brain.Event:2")
        if after:
            self._add(step=after + 1, session_log={"status": "START"})  # later records are dropped

    def write(self, step: int, values: Values, tags: Values) -> None:
        self._add(
            step=step,
            summary={"value": [{"tag": t, "simple_value": value} for t, value in tags.items()]},
        )

    def _add(self, **fields: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **fields).SerializeToString())


def _append(file: FileIO, record: bytes) -> None:
    """Write a record at once, since a run may be killed; of one that a full disk cuts off, leave
    nothing.
    """
    end, rest = file.seek(0, os.SEEK_END), record
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError as error:
        file.truncate(end)
        raise OSError(error.errno, error.strerror, str(file.name)) from error


def _drop_later(path: Path, after: int) -> None:
    """Remove from a metrics.jsonl the steps later than `after`, and a line that a killed run left
    incomplete.
    """
    end, late, is_cut = 0, b"", False
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
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
