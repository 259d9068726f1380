"""What the host sees of the steps between two logged ones: their times, the wait for data, and recompiles."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np


class StepClock:
    """Call `step_done` after every step, and `restart` when an interval has been logged.

    The times are the host's: nothing here waits for the device. On a GPU the host runs up to a step ahead, so a
    single time may belong to the step before; only logged steps end together with the device, and sums are right.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._expected: int | None = None
        self._warm: set[str] = set()
        self.recompiles = 0
        self.restart()

    def restart(self) -> None:
        """Begin an interval."""
        self._last, self._data = self._now(), 0.0
        self._steps: list[float] = []

    def step_done(self) -> None:
        """A step ends here, and the next begins."""
        now = self._now()
        self._steps.append(now - self._last)
        self._last = now
        graphs = compiled_graphs()
        self._expected = graphs if self._expected is None else self._expected  # the first step compiles
        self.recompiles = graphs - self._expected

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        began = self._now()
        yield
        self._data += self._now() - began

    @contextmanager
    def paused(self, kind: str) -> Iterator[None]:
        """What happens here is not a step's time. The first time of its kind is its warm-up: the graphs that it
        compiles are expected, those of later ones are recompiles."""
        began, graphs = self._now(), compiled_graphs()
        yield
        self._last += self._now() - began
        if kind not in self._warm and self._expected is not None:
            self._expected += compiled_graphs() - graphs
        self._warm.add(kind)

    @property
    def seconds(self) -> float:
        """Mean time of a step."""
        return sum(self._steps) / len(self._steps)

    @property
    def data_seconds(self) -> float:
        """Mean wait for data of a step."""
        return self._data / len(self._steps)

    def percentile(self, percent: float) -> float:
        """Time that this share of the steps did not exceed."""
        return float(np.percentile(self._steps, percent))


def compiled_graphs() -> int:
    """Graphs that torch.compile has made in this process. (Its counters are private; tried on torch 2.11 and 2.13.
    Where they are not loaded, nothing was compiled.)"""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.counters["stats"]["unique_graphs"] if dynamo else 0
