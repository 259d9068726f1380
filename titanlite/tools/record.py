"""The record that a run leaves in its folder: metrics, and what happened to it. No torch, no
matplotlib.
"""

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

FIELDS = {
    "loss": "step tokens step_seconds loss grad_norm lr tps memory_gib eta_seconds".split(),
    "validation_loss": ["step", "validation_loss"],
    "checkpoint_write_seconds": ["step", "checkpoint_blocked_seconds", "checkpoint_write_seconds"],
    "skipped": ["step", "skipped"],
}
"""Those of a record, by the one that only such a record has."""
TITLES = {
    "loss": "Training loss",
    "validation_loss": "Validation loss",
    "grad_norm": "Gradient norm before clipping",
    "lr": "Learning rate",
    "tps": "Tokens per second per device",
}
NOT_ALWAYS = {"memory_gib": None, "eta_seconds": None}
"""Fields that records of earlier versions lack."""
BLOCKS, ASCII = " ▁▂▃▄▅▆▇█", " _.,-=+*#"


@dataclass(frozen=True)
class Run:
    """One metrics.jsonl as arrays with named fields: its logged steps, validations, saves and bad
    steps.
    """

    name: str
    folder: Path
    logged: np.ndarray
    validated: np.ndarray
    saved: np.ndarray
    bad: np.ndarray

    @cached_property
    def history(self) -> list[dict[str, Any]]:
        """Its starts, restarts and stops."""
        return read_events(self.folder)

    def values(self, key: str) -> np.ndarray:
        return (self.validated if key == "validation_loss" else self.logged)[key]

    def curve(self, key: str, x_axis: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the x and y values of a curve. Hours are spent in steps: without saves and
        validation.
        """
        steps = self.logged["step"]
        seconds = np.cumsum(self.logged["step_seconds"] * np.diff(steps, prepend=steps[0] - 1))
        x = {"steps": steps, "tokens": self.logged["tokens"], "hours": seconds / 3600}[x_axis]
        if key != "validation_loss":
            return x, self.values(key)
        # A validation may lie between two logged steps, or after the last one of a run that is
        # still training.
        known_steps, known_x = ([0.0, *values, 2 * values[-1]] for values in (steps, x))
        return np.interp(self.validated["step"], known_steps, known_x), self.values(key)

    def events(self) -> list[tuple[str, str]]:
        """Return what the run needed, saved and suffered: names and texts."""
        logs = self.folder / "logs"
        restarts = sum(event["event"] == "restart" for event in self.history)
        memory = np.fmax.reduce(self.logged["memory_gib"], initial=0)
        saves = f"{len(self.saved)}"
        for save in self.saved[-1:]:
            saves += "; step {0:.0f} in {2:.2f} s, {1:.2f} s of waiting".format(*save)
        on_cpu = '"device": "cpu"' in text_of(self.folder / ENVIRONMENT)
        whole = " (the whole process, with Python and torch)" if on_cpu else ""
        measured = f"{memory:.2f} GiB measured{whole}" if memory else "not measured yet"
        ending = self.stop.get("why", "")
        return [
            ("memory", measured),
            ("saves", saves),
            ("restarts", f"{restarts} since the first start"),
            ("hangs", f"{len([*logs.glob('hang-*.txt')])} since the last start"),
            ("bad steps", f"{len(self.bad)}"),
            *[("end", ending)][: bool(ending)],
        ]

    @property
    def stop(self) -> dict[str, Any]:
        """Its last event, where that is a stop: how and why."""
        return next((event for event in self.history[-1:] if event["event"] == "stop"), {})

    @property
    def is_done(self) -> bool:
        """Whether its last step was reached, and saved."""
        return self.stop.get("how") == DONE


def text_of(file: Path) -> str:
    """Return the text of a file; nothing if it is missing."""
    return file.read_text("utf-8", "replace") if file.exists() else ""


def read_run(dump: Path) -> Run:
    """Read the metrics in a dump folder, or a metrics.jsonl itself, without a last line that is not
    complete yet.
    """
    file = dump / METRICS if dump.is_dir() else dump
    if not file.is_file() and not (dump / "logs").exists():  # a run that starts has only logs
        below = ", ".join(f"{path.parent}" for path in sorted(dump.glob(f"*/{METRICS}")))
        hint = f"; runs below it: {below}; titanlite plot {dump}/* compares them" if below else ""
        raise UserError(
            f"{file} does not exist; give the dump folder of a run (job.dump_folder){hint}"
        )
    rows = {key: {} for key in FIELDS}
    lines = text_of(file).rstrip().split("\n")
    for number, line in enumerate(lines, 1):
        try:
            record = NOT_ALWAYS | json.loads(line or "{}")
            for key, fields in FIELDS.items():
                if key in record:
                    row = tuple(np.float64(record[field]) for field in fields)  # null is nan
                    rows[key][int(record["step"])] = row
        except (ValueError, KeyError, TypeError) as error:
            if number < len(lines) or not isinstance(error, json.JSONDecodeError):
                reason = f"{error} is missing" if isinstance(error, KeyError) else error
                raise UserError(
                    f"line {number} of {file} is not a metrics record: {reason}"
                ) from error
            print_notice(f"line {number} of {file} is incomplete and skipped")
    tables = [[row for _, row in sorted(rows[key].items())] for key in FIELDS]
    types = ([(field, float) for field in fields] for fields in FIELDS.values())
    return Run(str(dump), file.parent, *map(np.array, tables, types))


def smooth(y: np.ndarray) -> np.ndarray:
    """Return the moving mean over a thirtieth of the points, centered so that it does not lag.

    At the start, where curves are steep, the window shrinks; at the end it is cut.
    """
    most = max(2, len(y) // 60) if len(y) >= 60 else 0
    valid, means = np.isfinite(y), np.full(len(y), np.nan)
    for place in np.flatnonzero(valid):
        half = min(most, place)
        window = slice(place - half, place + half + 1)
        means[place] = y[window][valid[window]].mean()
    return means


def chart(values: np.ndarray, width: int, ends: tuple[float, float] | None = None) -> str:
    """Return a line of blocks as high as the values, between the lowest and the highest or `ends`,
    empty where one is not finite; a terminal without blocks has other characters.
    """
    blocks = BLOCKS if "utf" in sys.stdout.encoding.lower() else ASCII
    means = [part.mean() for part in np.array_split(values, min(width, len(values)))]
    levels = np.interp(means, ends or (np.fmin.reduce(means), np.fmax.reduce(means)), (1, 8))
    return "".join(blocks[round(level)] for level in np.nan_to_num(levels))
