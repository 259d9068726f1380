"""Compare two implementations that were timed in turn in one process: their ratio and its
confidence interval.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable
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
    """Return the ratio of the medians."""
    return _resampled(lambda a, b: np.median(a, axis=-1) / np.median(b, axis=-1), ours, theirs)


def jitter(seconds: Any) -> Any:
    """Return how far the 95th percentile lies above the median, as a fraction of the median."""
    middle, high = np.quantile(seconds, (0.5, 0.95), axis=-1)
    return high / middle - 1


def more_jitter(ours: list[float], theirs: list[float]) -> Range:
    """Return how much larger our jitter is."""
    return _resampled(lambda a, b: jitter(a) - jitter(b), ours, theirs)


def _resampled(compare: Callable[[Any, Any], Any], ours: list[float], theirs: list[float]) -> Range:
    """Resample pairs of steps taken in turn, since a drift of the machine affects both of a
    pair.
    """
    a, b = np.array(ours), np.array(theirs)
    picks = np.random.default_rng(0).integers(len(a), size=(RESAMPLES, len(a)))
    low, high = np.quantile(compare(a[picks], b[picks]), (0.025, 0.975))
    return Range(float(compare(a, b)), float(low), float(high))


def keep(path: Path, name: str, record: dict[str, Any]) -> None:
    """Store a record under its name in a JSON file, with the date, the command and the machine."""
    records = json.loads(path.read_text()) if path.exists() else {}
    records[name] = record | {
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python", *sys.argv]),
        "revision": git_revision(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": machine(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dict(sorted(records.items())), indent=1) + "\n")


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
