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
        self._graphs: int | None = None
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
        self._graphs = graphs if self._graphs is None else self._graphs  # the first step compiles
        self.recompiles = graphs - self._graphs

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        began = self._now()
        yield
        self._data += self._now() - began

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens here is not a step's time."""
        began = self._now()
        yield
        self._last += self._now() - began

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
