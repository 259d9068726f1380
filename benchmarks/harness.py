"""Shared by the benchmarks: the ratio of two implementations timed in turn in one process, with its
confidence interval, and records of measurements.

Records that docs cite are in benchmarks/records, in a folder per device.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from titanlite.observe.run_folder import git_revision

RESAMPLES = 2000


@dataclass(frozen=True)
class Range:
    """A value and its 95 % interval over resamplings of the pairs."""

    middle: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.middle:.3f} ({self.low:.3f} to {self.high:.3f})"


def ratio(ours: list[float], theirs: list[float]) -> Range:
    """Return the ratio of the medians.

    Pairs of steps taken in turn are resampled: a drift of the machine affects both of a pair.
    """
    a = np.array(ours)
    b = np.array(theirs)
    picks = np.random.default_rng(0).integers(len(a), size=(RESAMPLES, len(a)))
    resampled = np.median(a[picks], axis=-1) / np.median(b[picks], axis=-1)
    low, high = np.quantile(resampled, (0.025, 0.975))
    return Range(float(np.median(a) / np.median(b)), float(low), float(high))


def keep(path: Path, record: dict[str, Any]) -> None:
    """Store a record in a JSON file, with the date, the command and the machine."""
    record = record | {
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python", *sys.argv]),
        "revision": git_revision(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": machine(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def machine() -> str:
    """Return the kind and number of GPUs, or of processor cores."""
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    cores = [
        line
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return f"{len(cores)} cores of {cores[0].partition(': ')[2]}" if cores else platform.processor()
