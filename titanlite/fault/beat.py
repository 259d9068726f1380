"""Tell the launchers once a second where this rank is, and hear from them that the run should stop.

A thread with a connection of its own to the launchers' store: another thread may wait in the first one for minutes.
"""

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch.distributed as dist

from titanlite.config.schema import JobConfig
from titanlite.errors import FAILED
from titanlite.fault.hang import HangWatch, beat_interval, beat_key
from titanlite.fault.inspection import RankProcess
from titanlite.fault.stall import ENDED, Beat
from titanlite.runtime.cluster import RankInfo
from titanlite.runtime.distributed import attempt_store, connect_again
from titanlite.runtime.page import OWN_PAGE, Page
from titanlite.runtime.rank_files import LAUNCHED, STOP, attempt_number


def phase_limit(config: JobConfig, page: Page) -> tuple[float, str]:
    """Return how many seconds the phase may take before the rank counts as stalled, and the key that says so."""
    comm, stall = config.comm, config.fault.stall_seconds
    if page.phase in ("load", "save"):
        return comm.checkpoint_timeout_seconds, "comm.checkpoint_timeout_seconds"
    if page.phase == "start" or page.step == page.first_step:
        return comm.init_timeout_seconds, "comm.init_timeout_seconds"
    return (stall, "fault.stall_seconds") if stall else (comm.train_timeout_seconds, "comm.train_timeout_seconds")


class Heart(threading.Thread):
    """The thread. Without a store, which one process has no need of, it beats nowhere."""

    def __init__(
        self,
        config: JobConfig,
        rank: RankInfo,
        environ: Mapping[str, str],
        on_stop: Callable[[str], None],
        asked: Callable[[], str] = str,
    ) -> None:
        """`asked` returns why this rank was asked to stop, for the launchers and through them for the other ranks."""
        super().__init__(name="beat", daemon=True)
        self._config, self._rank, self._on_stop, self._asked = config, rank, on_stop, asked
        self._environ, self._ended = environ, threading.Event()

    def run(self) -> None:
        with suppress(dist.DistError, RuntimeError):  # the store went with its launcher
            launchers = connect_again(self._rank, self._environ, timedelta(seconds=60))
            if launchers is None:
                return
            attempt, key = attempt_store(launchers, attempt_number(self._environ)), beat_key(self._rank.rank)
            watch = None if LAUNCHED in self._environ else self._watch(attempt)
            while True:
                attempt.set(key, self.beat().render())
                if launchers.check([STOP]):
                    self._on_stop(launchers.get(STOP).decode())
                elif (reason := self._asked()) and LAUNCHED in self._environ:
                    launchers.set(STOP, reason)
                if watch and watch.look():
                    time.sleep(self._rank.rank == 0)  # the others read from a store that may be this process's
                    os._exit(FAILED)
                if self._ended.wait(beat_interval(self._rank.world)):
                    attempt.set(key, replace(self.beat(), phase=ENDED).render())
                    return

    def _watch(self, attempt: dist.Store) -> HangWatch:
        """Return what watches for a hang where no launcher does; its report comes from rank 0."""
        who = self._rank.world, self._rank.world, self._rank.rank
        say = partial(print, file=sys.stderr, flush=True)
        return HangWatch(attempt, self._config, *who, self._this_process, attempt_number(self._environ), say)

    def _this_process(self) -> dict[int, RankProcess]:
        stack = Path(self._config.job.dump_folder, "logs", f"rank-{self._rank.rank}.stack")
        faulthandler.register(signal.SIGUSR2, stack.open("w"))
        return {self._rank.rank: RankProcess(os.getpid(), stack, Path(os.devnull))}

    def beat(self) -> Beat:
        page, host = OWN_PAGE, self._rank.host
        seconds = round(time.monotonic() - page.since, 1)
        limit = phase_limit(self._config, page)
        return Beat(page.step, page.phase, page.sequence, seconds, *limit, os.getpid(), host, page.completed)

    def end(self) -> None:
        """Tell that this rank has nothing left to do, and beat no more."""
        self._ended.set()
        self.join(5)
