"""Step times, waits for data and recompilations between two logged steps, as seen by the host."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from titanlite.runtime.torch_private import compiled_graphs


class StepClock:
    """Measures steps: call `step_done` after every step, and `restart` when an interval has been
    logged.

    Nothing here waits for the device. On a GPU the host runs up to a step ahead, so a single time
    may belong to the previous step; a logged step ends when the device does, so sums are correct.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._expected_graphs: int | None = None
        self._seen_pauses: set[str] = set()
        self.recompiles = 0
        self.restart()

    def restart(self) -> None:
        """Start an interval."""
        self._step_start = self._now()
        self._data_wait = 0.0
        self._step_times: list[float] = []

    def step_done(self) -> None:
        """End a step and start the next."""
        now = self._now()
        self._step_times.append(now - self._step_start)
        self._step_start = now
        graphs = compiled_graphs()
        if self._expected_graphs is None:  # the first step compiles
            self._expected_graphs = graphs
        self.recompiles = graphs - self._expected_graphs

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Add the time of this context to the step's wait for data."""
        start = self._now()
        yield
        self._data_wait += self._now() - start

    @contextmanager
    def paused(self, kind: str) -> Iterator[None]:
        """Leave this context out of the step's time.

        Graphs compiled in the first pause of a kind are expected; those compiled in later ones are
        recompilations."""
        start = self._now()
        graphs = compiled_graphs()
        yield
        self._step_start += self._now() - start
        if kind not in self._seen_pauses and self._expected_graphs is not None:
            self._expected_graphs += compiled_graphs() - graphs
        self._seen_pauses.add(kind)

    @property
    def seconds(self) -> float:
        """Mean time of a step."""
        return sum(self._step_times) / len(self._step_times)

    @property
    def data_seconds(self) -> float:
        """Mean wait for data in a step."""
        return self._data_wait / len(self._step_times)

    def percentile(self, percent: float) -> float:
        """Return the time that `percent` of the steps did not exceed."""
        return float(np.percentile(self._step_times, percent))
