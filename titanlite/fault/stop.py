"""A stop request: its reason, and the thread that ends this rank when the time to save is over.

It comes by SIGTERM or SIGUSR1, by its launcher through a file, by another rank through the step, or
by the clock. The trainer sends the request along with the next step, saves after the one that
carried it, and leaves."""

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
        self._rank, self._grace = rank.rank, config.fault.grace_seconds
        self._page = own_file(environ, PAGE)
        self._limit, self._limit_name = time_limit(config, environ)
        self._asked_at = self._signaled_at = math.inf
        self._pipe = -1

    def ask(self, reason: str) -> None:
        """Request a stop of this rank; the first reason stays."""
        if not self.reason:
            self._asked_at, self.reason = time.monotonic(), reason
            OWN_PAGE.beat(reason)  # now: another rank may fail before the next heartbeat

    def listen(self) -> None:
        """Start to handle signals and the clock; in the main thread, which may be inside a
        collective or a compiler when a signal comes: Python writes its number into a pipe, and a
        thread reads that."""
        self._pipe, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            signal.signal(number, lambda *_: None)
            # Libraries may not expect that a call is interrupted.
            signal.siginterrupt(number, False)
        # Who started this may have blocked them.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        os.register_at_fork(after_in_child=_hear_nothing)
        self.start()

    def run(self) -> None:
        while True:
            ready, _, _ = select.select([self._pipe], [], [], 0.5)
            for number in os.read(self._pipe, 64) if ready else b"":
                if number in STOP_SIGNALS:
                    self._hear(signal.Signals(number))
            now = time.monotonic()
            if not self.reason and time.time() > self._limit:
                self.ask(self._limit_name)
            if cause := self.overdue(now):
                os._exit(self.leave(cause))

    def _hear(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if now > self._signaled_at + SAME_REQUEST_SECONDS:
            os._exit(self.leave(f"second signal: {number.name}"))
        self._signaled_at = min(now, self._signaled_at)
        self.ask(f"{number.name} to rank {self._rank}")

    def overdue(self, now: float) -> str:
        """Return why this rank must leave although it has not saved, or nothing."""
        if now > self._asked_at + self._grace:
            return f"fault.grace_seconds = {self._grace} ran out"
        # Without data no rank can take a step: waiting longer would save nothing.
        if OWN_PAGE.phase == "data" and now > max(self._asked_at, OWN_PAGE.since) + self._grace / 2:
            return f"no data for half of fault.grace_seconds = {self._grace}"
        return ""

    def others_may_have_left(self) -> bool:
        """Whether other ranks may have exited after the stop request, making this error a
        consequence.
        """
        if self._page and early_exits(self._page.parent):
            return True
        return time.monotonic() > self._asked_at + self._grace / 2  # on other nodes

    def left(self, cause: str = "") -> EarlyExit:
        """Return the record of an exit now: its reason, and the lost steps."""
        lost = max(0, OWN_PAGE.completed - OWN_PAGE.saved)
        reason = f"{self.reason}; {cause}" if cause else self.reason
        return EarlyExit(CUT_SHORT if lost else STOPPED, OWN_PAGE.completed, reason, lost)

    def leave(self, cause: str = "") -> int:
        """Record the early exit; return the exit code, below titanlite's launcher that of success:
        no rank failed.
        """
        ending = self.left(cause)
        OWN_PAGE.end(ending)
        return OK if self._page else ending.code


def _hear_nothing() -> None:
    """In a forked child, such as a data worker: let signals end it as by default."""
    signal.set_wakeup_fd(-1)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def time_limit(config: JobConfig, environ: Mapping[str, str]) -> tuple[float, str]:
    """Return the time of a stop request by a limit, in seconds since 1970, and the name of the
    limit.
    """
    minutes, limits = config.fault.stop_after_minutes, [(math.inf, "")]
    if minutes:
        started = float(environ[STARTED]) if LAUNCHED in environ else time.time()
        limits.append((started + 60 * minutes, f"fault.stop_after_minutes = {minutes:g}"))
    if end := read_number(environ, "SLURM_JOB_END_TIME", 0):
        limits.append((end, "the end of the SLURM job"))
    limit, name = min(limits)
    return limit - config.fault.grace_seconds, name
