"""A run that is asked to stop: tell the ranks, end those that do not leave in time, and say how the run ended.

With checkpoints SIGTERM, SIGUSR1 and Ctrl-C ask; without, nothing could be saved, and they end the run at once. No
torch.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlite.checkpoint.manifest import latest_complete
from titanlite.checkpoint.resume import checkpoint_root
from titanlite.config.schema import JobConfig
from titanlite.errors import CUT_SHORT, STOPPED
from titanlite.launch.failure import Exit
from titanlite.launch.terminal import say
from titanlite.runtime.page import EarlyExit, read_pages
from titanlite.runtime.rank_files import SAME_REQUEST_SECONDS, STARTED, STOP_SIGNALS

if TYPE_CHECKING:
    from titanlite.launch.rendezvous import NodeRendezvous

CTRL_C = "Ctrl-C"
EXTRA_SECONDS = 5
"""Beyond the grace, before the launcher kills ranks: they may hear of a request later than it does."""


class Stopped(BaseException):
    """The run has ended because it was asked to."""

    def __init__(self, left: EarlyExit) -> None:
        super().__init__(left.reason)
        self.left, self.code = left, left.code


class Stopping:
    """A request to stop, to this launcher or to one that tells it."""

    def __init__(self, config: JobConfig) -> None:
        """Hear signals from now on. While there are no workers, they raise Stopped."""
        self._config, self._private = config, Path()
        self.reason = ""
        """Why to stop; empty without a request."""
        self._asked_at, self._signaled_at, self._running = 0.0, math.inf, False
        self._announced = False
        os.environ[STARTED] = str(time.time())
        for number in (*STOP_SIGNALS, signal.SIGINT) if config.checkpoint.enable else ():
            signal.signal(number, self._hear)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def _hear(self, number: int, _: Any) -> None:
        if number == signal.SIGINT and not self._running:
            raise KeyboardInterrupt
        name, now = signal.Signals(number).name, time.monotonic()
        if now > self._signaled_at + SAME_REQUEST_SECONDS:
            self._kill(f"second signal: {name}")
        self._signaled_at = min(now, self._signaled_at)
        if not self.reason:
            self.reason = CTRL_C if number == signal.SIGINT else f"{name} to the launcher"
            self._asked_at = now
        if not self._running:
            raise Stopped(self._ended())

    @contextmanager
    def during(self, rendezvous: NodeRendezvous, private: Path) -> Iterator[Callable[[Mapping[int, Exit]], None]]:
        """Leave a request to the workers that run inside; yield what raises Stopped if one ended them.

        Their files are in `private`.
        """
        self._rendezvous, self._private, self._running = rendezvous, private, True
        rendezvous.on_poll.append(self._poll)
        try:
            yield self._judge
        except Stopped as stopped:
            raise Stopped(self._told_by_ranks() or stopped.left) from None
        finally:
            self._running = False
            rendezvous.on_poll.remove(self._poll)

    def _poll(self) -> None:
        """Exchange requests with the other launchers and the ranks; end ranks whose time is over."""
        now, grace = time.monotonic(), self._config.fault.grace_seconds
        if (reason := self._rendezvous.exchange_stop(self.reason)) and not self.reason:
            self.reason, self._asked_at = reason, now
        if self.reason == CTRL_C and not self._announced:
            self._announced = True
            say("\ntitanlite: Ctrl-C: saving this step, then stopping; Ctrl-C again stops at once")
        if any(ending.code == CUT_SHORT for ending in _endings(self._private)):  # no other rank can save any more
            raise Stopped(self._ended())
        if self.reason and now > self._asked_at + grace + EXTRA_SECONDS:
            self._kill(f"fault.grace_seconds = {grace} ran out")

    def _kill(self, cause: str) -> None:
        self.reason += f"; {cause}"
        for page in read_pages(self._private).values() if self._running else ():
            with suppress(ProcessLookupError):
                os.kill(page.pid, signal.SIGKILL)
        raise Stopped(self._ended())

    def _judge(self, exits: Mapping[int, Exit]) -> None:
        """Raise Stopped if a request ended these workers of this node, rather than a failure or the target step."""
        if left := self._told_by_ranks():
            raise Stopped(left)
        codes = {exit.code or 0 for exit in exits.values() if not exit.ended} - {0}
        signals = (*STOP_SIGNALS, signal.SIGINT) if self.reason else STOP_SIGNALS
        if self._config.checkpoint.enable and codes and codes <= {-number for number in signals}:
            # Before it could hear signals. One that can is never ended by them.
            self.reason = self.reason or f"{signal.Signals(-codes.pop()).name} to a rank that was starting"
            raise Stopped(self._ended())

    def _told_by_ranks(self) -> EarlyExit | None:
        """Return how the run ended by what the rank of this node wrote that knows best, None if none did.

        One rank that has saved its last step is enough: no other has taken a later one.
        """
        endings = _endings(self._private)
        return min(endings, key=lambda ending: (ending.code, "another rank" in ending.reason), default=None)

    def _ended(self) -> EarlyExit:
        """Return how a run ends whose ranks could not tell it."""
        step = last_completed(self._private) if self._running else 0
        saved = latest_complete(checkpoint_root(self._config)) or 0
        lost = max(0, step - saved)
        return EarlyExit(CUT_SHORT if lost else STOPPED, max(step, saved), self.reason, lost)


def last_completed(private: Path) -> int:
    """Return the last step that a worker of this node has completed; 0 if none has."""
    return max((page.completed for page in read_pages(private).values()), default=0)


def _endings(private: Path) -> list[EarlyExit]:
    """Return the early exits of this node's workers."""
    return [page.ending for page in read_pages(private).values() if page.ending]
