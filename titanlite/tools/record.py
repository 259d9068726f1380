"""The record of a run in its folder: metrics and events. Imports neither torch nor matplotlib."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from titanlite.checkpoint.manifest import ENVIRONMENT
from titanlite.errors import UserError, print_notice
from titanlite.observe.events import DONE, read_events
from titanlite.observe.run_folder import METRICS

BLOCKS = " ▁▂▃▄▅▆▇█"
ASCII = " _.,-=+*#"


@dataclass(frozen=True)
class Run:
    """A run, as recorded in its files."""

    name: str
    folder: Path
    records: list[dict[str, float]]
    """The lines of metrics.jsonl, each with "step"; values that are not finite are nan."""

    @cached_property
    def history(self) -> list[dict[str, Any]]:
        """The starts, restarts and stops of the run."""
        return read_events(self.folder)

    def column(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the steps that recorded a metric, and its values."""
        by_step = {record["step"]: record[key] for record in self.records if key in record}
        steps = sorted(by_step)
        return np.array(steps, int), np.array([by_step[step] for step in steps], float)

    def values(self, key: str) -> np.ndarray:
        return self.column(key)[1]

    def last(self, key: str) -> float:
        """Return the last value of a metric; nan if there is none."""
        values = self.values(key)
        return values[-1] if len(values) else np.nan

    @property
    def steps(self) -> list[int]:
        """The logged steps."""
        return self.column("loss")[0].tolist()

    def curve(self, key: str, x_axis: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the x and y values of a curve over "steps" or "tokens"."""
        steps, y = self.column(key)
        if x_axis == "steps":
            return steps, y
        # A validation may fall between two logged steps, or after the last one of a running run.
        logged, tokens = self.column("tokens")
        known_steps = [0.0, *logged, 2 * logged[-1]]
        known_tokens = [0.0, *tokens, 2 * tokens[-1]]
        return np.interp(steps, known_steps, known_tokens), y

    def events(self) -> list[tuple[str, str]]:
        """Return names and texts about the run's memory, saves and failures."""
        logs = self.folder / "logs"
        restarts = sum(event["event"] == "restart" for event in self.history)
        rows = [
            ("memory", self._memory()),
            ("saves", self._saves()),
            ("restarts", f"{restarts} since the first start"),
            ("hangs", f"{len([*logs.glob('hang-*.txt')])} since the last start"),
            ("bad steps", f"{len(self.values('skipped'))}"),
        ]
        why = self.stop.get("why")
        if why:
            rows.append(("end", why))
        return rows

    def _memory(self) -> str:
        """Return the measured memory."""
        memory = np.fmax.reduce(self.values("memory_gib"), initial=0)
        if not memory:
            return "not measured yet"
        measured = f"{memory:.2f} GiB measured"
        if '"device": "cpu"' in text_of(self.folder / ENVIRONMENT):
            measured += " (the whole process, with Python and torch)"
        return measured

    def _saves(self) -> str:
        """Return the number of saves and the cost of the last."""
        steps, seconds = self.column("checkpoint_write_seconds")
        if not len(steps):
            return "0"
        waiting = self.last("checkpoint_blocked_seconds")
        last = f"step {steps[-1]} in {seconds[-1]:.2f} s, {waiting:.2f} s of waiting"
        return f"{len(steps)}; {last}"

    @property
    def stop(self) -> dict[str, Any]:
        """The last event if it is a stop, with how and why; otherwise empty."""
        if self.history and self.history[-1]["event"] == "stop":
            return self.history[-1]
        return {}

    @property
    def is_done(self) -> bool:
        """Whether the last step was reached and saved."""
        return self.stop.get("how") == DONE


def text_of(file: Path) -> str:
    """Return the text of a file; an empty string if it is missing."""
    if file.exists():
        return file.read_text("utf-8", "replace")
    return ""


def read_run(dump: Path) -> Run:
    """Read the metrics in a dump folder, or a metrics.jsonl itself, without an incomplete last
    line.
    """
    file = dump / METRICS if dump.is_dir() else dump
    if not file.is_file() and not (dump / "logs").exists():  # a starting run has only logs
        below = ", ".join(f"{path.parent}" for path in sorted(dump.glob(f"*/{METRICS}")))
        hint = ""
        if below:
            hint = f"; runs below it: {below}; titanlite plot {dump}/* compares them"
        raise UserError(
            f"{file} does not exist; give the dump folder of a run (job.dump_folder){hint}"
        )
    records = []
    lines = text_of(file).splitlines()
    for number, line in enumerate(lines, 1):
        try:
            records.append(_numbers(json.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if number < len(lines) or not isinstance(error, json.JSONDecodeError):
                raise UserError(
                    f"line {number} of {file} is not a metrics record: {error!r}"
                ) from error
            print_notice(f"line {number} of {file} is incomplete and skipped")
    return Run(str(dump), file.parent, records)


def _numbers(record: dict[str, Any]) -> dict[str, float]:
    """Return a record of metrics.jsonl, with nan for null; raise if it is not a record."""
    numbers = {}
    for key, value in record.items():
        numbers[key] = np.nan if value is None else float(value)
    return numbers | {"step": int(record["step"])}


def smooth(y: np.ndarray) -> np.ndarray:
    """Return the moving mean over a thirtieth of the points, centered so that it does not lag.

    At the start, where curves are steep, the window is smaller; at the end it is truncated.
    """
    most = max(2, len(y) // 60) if len(y) >= 60 else 0
    valid = np.isfinite(y)
    means = np.full(len(y), np.nan)
    for place in np.flatnonzero(valid):
        half = min(most, place)
        window = slice(place - half, place + half + 1)
        means[place] = y[window][valid[window]].mean()
    return means


def chart(values: np.ndarray, width: int, ends: tuple[float, float] | None = None) -> str:
    """Return a line of blocks as high as the values, scaled to their range or to `ends`, and empty
    where a value is not finite. Terminals without block characters get others.
    """
    blocks = ASCII
    if "utf" in sys.stdout.encoding.lower():
        blocks = BLOCKS
    means = [part.mean() for part in np.array_split(values, min(width, len(values)))]
    levels = np.interp(means, ends or (np.fmin.reduce(means), np.fmax.reduce(means)), (1, 8))
    return "".join(blocks[round(level)] for level in np.nan_to_num(levels))
