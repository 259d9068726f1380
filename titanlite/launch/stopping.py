"""A stop request: pass it on to the ranks, and end those that do not leave in time.

With checkpoints, SIGTERM, SIGUSR1 and Ctrl-C are requests; without, there is nothing to save, and
they end the run at once. Imports no torch.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlite.checkpoint.status import newest_step
from titanlite.config.schema import JobConfig
from titanlite.errors import CUT_SHORT, STOPPED
from titanlite.fault.status import Ended
from titanlite.launch.failure import Exit
from titanlite.launch.terminal import say
from titanlite.runtime.page import EarlyExit, Page, early_exits, read_pages
from titanlite.runtime.rank_files import SAME_REQUEST_SECONDS, STARTED, STOP, STOP_SIGNALS
from titanlite.runtime.store import LocalPath

if TYPE_CHECKING:
    from titanlite.launch.node import Node

CTRL_C = "Ctrl-C"
EXTRA_SECONDS = 5
"""Time beyond the grace before the launcher kills ranks, which may learn of a request later."""


class Stopped(BaseException):
    """The ranks of this node have ended, or never started, because of a stop request."""

    def __init__(self, early: EarlyExit) -> None:
        super().__init__(early.reason)
        self.early = early
        self.code = early.code


class Stopping:
    """A request to stop, sent to this launcher, another one, or a rank."""

    def __init__(self, config: JobConfig) -> None:
        """Catch signals from now on. Until the first workers start, they raise Stopped."""
        self._config = config
        self._has_begun = False
        self._private: Path | None = None
        """The folder of the workers' files while they run."""
        self.reason = ""
        """Why to stop; empty without a request."""
        self._asked_at = 0.0
        self._signaled_at = math.inf
        self._completed = 0
        """The last complete step of workers that have ended."""
        self._has_trained = False
        """Whether any workers completed a step."""
        os.environ[STARTED] = str(time.time())
        if config.checkpoint.enable:
            for number in (*STOP_SIGNALS, signal.SIGINT):
                signal.signal(number, self._catch)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def _catch(self, number: int, _: Any) -> None:
        if number == signal.SIGINT and not self._has_begun:
            raise KeyboardInterrupt
        name = signal.Signals(number).name
        now = time.monotonic()
        if now > self._signaled_at + SAME_REQUEST_SECONDS:
            self._kill(f"second signal: {name}")
        self._signaled_at = min(now, self._signaled_at)
        if not self.reason:
            self.reason = CTRL_C if number == signal.SIGINT else f"{name} to the launcher"
            self._asked_at = now
        if not self._has_begun:
            raise Stopped(self._early())

    def expect_no_workers(self) -> None:
        """Treat signals as requests from now on, on a node that may never have workers."""
        self._has_begun = True

    def begin(self, private: Path) -> None:
        """Pass requests to the workers that start now, with their files in `private`."""
        self._has_begun = True
        self._private = private
        self._completed = 0

    def finish(self) -> None:
        """Note the workers' progress at their end. Signals remain requests: after a failure, they
        prevent another attempt.
        """
        self._completed = self._last_step()
        self._has_trained |= self._completed > 0
        self._private = None

    def poll(self, node: Node) -> None:
        """Pass a request on to the ranks; end those that do not leave in time."""
        private = self._private
        now = time.monotonic()
        assert private
        if not self.reason and node.decision.stop:
            self.reason = node.decision.stop
            self._asked_at = now
        if self.reason and not (private / STOP).exists():
            LocalPath(private, STOP).put(self.reason.encode())
            if self.reason == CTRL_C:
                say(
                    "\ntitanlite: Ctrl-C: saving after the current step, then stopping; "
                    "Ctrl-C again, after a second, stops at once"
                )
        if any(ending.code == CUT_SHORT for ending in early_exits(private)):
            raise Stopped(self._early())  # no other rank can still save
        grace = self._config.fault.grace_seconds
        if self.reason and now > self._asked_at + grace + EXTRA_SECONDS:
            self._kill(f"fault.grace_seconds = {grace} ran out")

    def ended(self, exits: Mapping[int, Exit]) -> Ended | None:
        """Return how these workers left on request; None if they failed or reached the target step.

        The most reliable record counts. One rank that saved its last step is enough, since no other
        has taken a later one."""
        assert self._private
        best = min(early_exits(self._private), key=lambda ending: ending.order, default=None)
        if best:
            return Ended(early=best, over=best.code == CUT_SHORT)
        codes = {exit.code or 0 for exit in exits.values() if not exit.ended} - {0}
        signals = STOP_SIGNALS
        if self.reason:
            signals = (*STOP_SIGNALS, signal.SIGINT)
        if self._config.checkpoint.enable and codes and codes <= {-number for number in signals}:
            # Only a rank that did not catch signals yet is ended by them.
            if not self.reason:
                self.reason = f"{signal.Signals(-codes.pop()).name} to a rank that was starting"
            return Ended(early=self._early(), over=True)
        return None

    def _kill(self, cause: str) -> None:
        if cause not in self.reason:
            self.reason += f"; {cause}"
        for page in self._pages():
            with suppress(ProcessLookupError):
                os.kill(page.pid, signal.SIGKILL)
        raise Stopped(self._early())

    def _pages(self) -> list[Page]:
        if self._private is None:
            return []
        return [*read_pages(self._private).values()]

    def _last_step(self) -> int:
        return max([self._completed, *(page.completed for page in self._pages())])

    def _early(self) -> EarlyExit:
        """Return the early exit of ranks that could not record it themselves."""
        step = self._last_step()
        saved = 0
        # A run that has not trained has saved nothing: what is there is an earlier run's.
        if self._config.checkpoint.enable and (step or self._has_trained):
            saved = newest_step(self._config) or 0
        lost = max(0, step - saved)
        code = CUT_SHORT if lost else STOPPED
        return EarlyExit(code, max(step, saved), self.reason, lost)
