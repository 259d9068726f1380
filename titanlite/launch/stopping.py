"""A stop request: pass it on, and end ranks that do not leave in time.

With checkpoints SIGTERM, SIGUSR1 and Ctrl-C are requests; without, nothing could be saved, and they
end the run at once. No torch."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlite.checkpoint.status import newest
from titanlite.config.schema import JobConfig
from titanlite.errors import CUT_SHORT, STOPPED
from titanlite.fault.status import Ended
from titanlite.launch.failure import Exit
from titanlite.launch.terminal import say
from titanlite.runtime.page import EarlyExit, early_exits, read_pages
from titanlite.runtime.rank_files import SAME_REQUEST_SECONDS, STARTED, STOP, STOP_SIGNALS
from titanlite.runtime.store import LocalPath

if TYPE_CHECKING:
    from titanlite.launch.node import Node

CTRL_C = "Ctrl-C"
EXTRA_SECONDS = 5
"""Beyond the grace, before the launcher kills ranks: they may learn of a request later than it
does.
"""


class Stopped(BaseException):
    """The ranks of this node have ended, or none was started, because of a stop request."""

    def __init__(self, early: EarlyExit) -> None:
        super().__init__(early.reason)
        self.early, self.code = early, early.code


class Stopping:
    """A request to stop, to this launcher, another one, or a rank."""

    def __init__(self, config: JobConfig) -> None:
        """Catch signals from now on. Before the first workers, they raise Stopped."""
        self._config = config
        self._has_begun = False
        self._private: Path | None = None
        """Where the workers' files are while they run."""
        self.reason = ""
        """Why to stop; empty without a request."""
        self._asked_at, self._signaled_at = 0.0, math.inf
        self._completed = 0
        """The last complete step of workers that have ended."""
        self._has_trained = False
        """Whether any workers had a complete step."""
        os.environ[STARTED] = str(time.time())
        for number in (*STOP_SIGNALS, signal.SIGINT) if config.checkpoint.enable else ():
            signal.signal(number, self._catch)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def _catch(self, number: int, _: Any) -> None:
        if number == signal.SIGINT and not self._has_begun:
            raise KeyboardInterrupt
        name, now = signal.Signals(number).name, time.monotonic()
        if now > self._signaled_at + SAME_REQUEST_SECONDS:
            self._kill(f"second signal: {name}")
        self._signaled_at = min(now, self._signaled_at)
        if not self.reason:
            self.reason = CTRL_C if number == signal.SIGINT else f"{name} to the launcher"
            self._asked_at = now
        if not self._has_begun:
            raise Stopped(self._early())

    def expect_no_workers(self) -> None:
        """Take signals for requests from now on, on a node that may never have workers."""
        self._has_begun = True

    def begin(self, private: Path) -> None:
        """Leave a request to the workers that start now, with their files in `private`."""
        self._has_begun = True
        self._private = private
        self._completed = 0

    def finish(self) -> None:
        """Signals are requests still: after a failure, none of them lets another attempt begin."""
        self._completed = self._last_step()
        self._has_trained |= self._completed > 0
        self._private = None

    def poll(self, node: Node) -> None:
        """Pass a request on to the ranks; end those that do not leave in time."""
        private, now = self._private, time.monotonic()
        assert private
        if not self.reason and node.decision.stop:
            self.reason, self._asked_at = node.decision.stop, now
        if self.reason and not (private / STOP).exists():
            LocalPath(private, STOP).put(self.reason.encode())
            if self.reason == CTRL_C:
                say(
                    "\ntitanlite: Ctrl-C: saving after the current step, then stopping; "
                    "Ctrl-C again, after a second, stops at once"
                )
        if any(
            ending.code == CUT_SHORT for ending in early_exits(private)
        ):  # no other rank can save any more
            raise Stopped(self._early())
        grace = self._config.fault.grace_seconds
        if self.reason and now > self._asked_at + grace + EXTRA_SECONDS:
            self._kill(f"fault.grace_seconds = {grace} ran out")

    def ended(self, exits: Mapping[int, Exit]) -> Ended | None:
        """Return how these workers left on request; None if they failed or reached the target step.

        The most reliable record counts. One that has saved its last step is enough: no other has
        taken a later one."""
        assert self._private
        best = min(early_exits(self._private), key=lambda ending: ending.order, default=None)
        if best:
            return Ended(early=best, over=best.code == CUT_SHORT)
        codes = {exit.code or 0 for exit in exits.values() if not exit.ended} - {0}
        signals = (*STOP_SIGNALS, signal.SIGINT) if self.reason else STOP_SIGNALS
        if self._config.checkpoint.enable and codes and codes <= {-number for number in signals}:
            # Before it could catch signals. One that can is never ended by them.
            self.reason = (
                self.reason or f"{signal.Signals(-codes.pop()).name} to a rank that was starting"
            )
            return Ended(early=self._early(), over=True)
        return None

    def _kill(self, cause: str) -> None:
        if cause not in self.reason:
            self.reason += f"; {cause}"
        for page in read_pages(self._private).values() if self._private else ():
            with suppress(ProcessLookupError):
                os.kill(page.pid, signal.SIGKILL)
        raise Stopped(self._early())

    def _last_step(self) -> int:
        pages = read_pages(self._private).values() if self._private else ()
        return max([self._completed, *(page.completed for page in pages)])

    def _early(self) -> EarlyExit:
        """Return the early exit of ranks that could not record it."""
        step = self._last_step()
        # Otherwise the folder has an older run's.
        saves = self._config.checkpoint.enable and (step or self._has_trained)
        saved = saves and newest(self._config) or 0
        lost = max(0, step - saved)
        return EarlyExit(CUT_SHORT if lost else STOPPED, max(step, saved), self.reason, lost)
