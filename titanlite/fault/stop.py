"""A stop request: its reason, and the thread that ends this rank when the time to save is up.

A request comes from SIGTERM or SIGUSR1, from the launcher through a file, from another rank through
the step, or from the clock. The trainer shares it in the next step, saves after that step, and
leaves."""

import math
import os
import select
import signal
import threading
import time
from collections.abc import Mapping

from titanlite.config.schema import JobConfig
from titanlite.errors import CUT_SHORT, OK, STOPPED
from titanlite.runtime.cluster import RankInfo, read_number
from titanlite.runtime.page import OWN_PAGE, EarlyExit, early_exits
from titanlite.runtime.rank_files import (
    LAUNCHED,
    PAGE,
    SAME_REQUEST_SECONDS,
    STARTED,
    STOP_SIGNALS,
    own_file,
)


class Stop(threading.Thread):
    """This rank's stop request. Signals and time limits count only after `listen`."""

    def __init__(self, config: JobConfig, rank: RankInfo, environ: Mapping[str, str]) -> None:
        super().__init__(name="stop", daemon=True)
        self.reason = ""
        """Why to stop; empty without a request."""
        self._rank = rank.rank
        self._grace = config.fault.grace_seconds
        self._page = own_file(environ, PAGE)
        self._limit, self._limit_name = time_limit(config, environ)
        self._asked_at = self._signaled_at = math.inf
        self._pipe = -1

    def ask(self, reason: str) -> None:
        """Request a stop of this rank; the first reason stays."""
        if not self.reason:
            self._asked_at = time.monotonic()
            self.reason = reason
            OWN_PAGE.beat(reason)  # another rank may fail before the next heartbeat

    def listen(self) -> None:
        """Start to handle signals and the clock. Call it in the main thread.

        The main thread may be inside a collective or a compiler when a signal arrives, so Python
        writes the signal's number to a pipe, which another thread reads."""
        self._pipe, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            signal.signal(number, lambda *_: None)
            # Libraries may not expect interrupted calls.
            signal.siginterrupt(number, False)
        # The parent process may have blocked them.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        os.register_at_fork(after_in_child=_hear_nothing)
        self.start()

    def run(self) -> None:
        while True:
            ready, _, _ = select.select([self._pipe], [], [], 0.5)
            if ready:
                for number in os.read(self._pipe, 64):
                    if number in STOP_SIGNALS:
                        self._hear(signal.Signals(number))
            now = time.monotonic()
            if not self.reason and time.time() > self._limit:
                self.ask(self._limit_name)
            cause = self.overdue(now)
            if cause:
                os._exit(self.leave(cause))

    def _hear(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if now > self._signaled_at + SAME_REQUEST_SECONDS:
            os._exit(self.leave(f"second signal: {number.name}"))
        self._signaled_at = min(now, self._signaled_at)
        self.ask(f"{number.name} to rank {self._rank}")

    def overdue(self, now: float) -> str:
        """Return why this rank must leave without having saved, or an empty string."""
        if now > self._asked_at + self._grace:
            return f"fault.grace_seconds = {self._grace} ran out"
        # Without data no rank can take another step, so waiting longer would not help.
        if OWN_PAGE.phase == "data" and now > max(self._asked_at, OWN_PAGE.since) + self._grace / 2:
            return f"no data for half of fault.grace_seconds = {self._grace}"
        return ""

    def others_may_have_left(self) -> bool:
        """Whether this error may be a consequence of other ranks' exits after a stop request."""
        if self._page and early_exits(self._page.parent):
            return True
        return time.monotonic() > self._asked_at + self._grace / 2  # on other nodes

    def left(self, cause: str = "") -> EarlyExit:
        """Return the record of an exit at this moment: its reason, and the steps lost."""
        lost = max(0, OWN_PAGE.completed - OWN_PAGE.saved)
        reason = self.reason
        if cause:
            reason += f"; {cause}"
        code = CUT_SHORT if lost else STOPPED
        return EarlyExit(code, OWN_PAGE.completed, reason, lost)

    def leave(self, cause: str = "") -> int:
        """Record the early exit; return the exit code. Under titanlite's launcher it is 0, since no
        rank failed.
        """
        ending = self.left(cause)
        OWN_PAGE.end(ending)
        return OK if self._page else ending.code


def _hear_nothing() -> None:
    """In a forked child, such as a data worker, restore the default effect of signals."""
    signal.set_wakeup_fd(-1)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def time_limit(config: JobConfig, environ: Mapping[str, str]) -> tuple[float, str]:
    """Return when the earliest time limit requests a stop, in seconds since 1970, and its name."""
    minutes = config.fault.stop_after_minutes
    limits = [(math.inf, "")]
    if minutes:
        started = float(environ[STARTED]) if LAUNCHED in environ else time.time()
        limits.append((started + 60 * minutes, f"fault.stop_after_minutes = {minutes:g}"))
    end = read_number(environ, "SLURM_JOB_END_TIME", 0)
    if end:
        limits.append((end, "the end of the SLURM job"))
    limit, name = min(limits)
    return limit - config.fault.grace_seconds, name
