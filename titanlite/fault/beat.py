"""Show a sign of life four times a second, and learn that the run should stop or that it hangs.

Under titanlite's launcher, a rank does so on its page, which the launcher reads; elsewhere, on a
board of all ranks, once a second or less often."""

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from titanlite.config.schema import JobConfig
from titanlite.errors import FAILED
from titanlite.fault.board import Board, Link, open_board
from titanlite.fault.inspection import RankProcess, inspect, wait_until
from titanlite.fault.stall import ENDED, Hangs
from titanlite.fault.status import Beat, Decision, Inspection, Status
from titanlite.runtime.cluster import RankInfo, store_address
from titanlite.runtime.distributed import write_flight_record
from titanlite.runtime.page import OWN_PAGE, Page
from titanlite.runtime.rank_files import (
    STACK,
    STOP,
    attempt_number,
    attempt_prefix,
    launcher_folder,
    own_file,
)

BEAT_SECONDS = 1.0
"""Time between checks of all ranks; the minimum between two exchanges with a board."""
LOOK_SECONDS = 0.25
"""Time between a rank's checks for requests, and between signs of life on its page."""
BEATS_PER_SECOND = 512
"""Beats of all ranks together under torchrun or srun, where each has a connection to one store."""


def phase_limit(config: JobConfig, page: Page) -> tuple[float, str]:
    """Return how many seconds a phase may take before the rank counts as stalled, and the key that
    sets this limit.
    """
    comm = config.comm
    stall = config.fault.stall_seconds
    if page.phase in ("load", "save"):
        return comm.checkpoint_timeout_seconds, "comm.checkpoint_timeout_seconds"
    compiles = page.phase in ("start", "validation", "sample")
    if compiles or page.step == page.first_step:
        return comm.init_timeout_seconds, "comm.init_timeout_seconds"
    if stall:
        return stall, "fault.stall_seconds"
    return comm.train_timeout_seconds, "comm.train_timeout_seconds"


def longest_limit(config: JobConfig) -> int:
    """Return the longest that any phase after the first step may take, except saves and loads.
    Collectives wait longer, so that the report of a hang comes first.
    """
    limits = [config.comm.train_timeout_seconds, config.fault.stall_seconds]
    if config.validation.enable or config.generate.at_end:
        limits.append(config.comm.init_timeout_seconds)
    return max(limits)


def beat_of(config: JobConfig, page: Page, host: str) -> Beat:
    """Return the content of a page on this host, as of its last heartbeat."""
    seconds = max(0.0, round(page.heartbeat - page.since, 1))
    limit, key = phase_limit(config, page)
    return Beat(
        page.step, page.phase, page.sequence, seconds, limit, key, page.pid, host, page.completed
    )


class Heart(threading.Thread):
    """The thread that beats. A single rank without a launcher needs none."""

    def __init__(
        self,
        config: JobConfig,
        rank: RankInfo,
        environ: Mapping[str, str],
        on_stop: Callable[[str], None],
        asked: Callable[[], str] = str,
    ) -> None:
        """`asked` returns this rank's reason to stop, which reaches the other ranks through the
        launchers.
        """
        super().__init__(name="beat", daemon=True)
        self._interval = max(BEAT_SECONDS, rank.world / BEATS_PER_SECOND)
        self._config = config
        self._rank = rank
        self._on_stop = on_stop
        self._asked = asked
        self._environ = environ
        self._ended = threading.Event()
        folder = launcher_folder(environ)
        self._request = folder / STOP if folder else None
        self._stack = own_file(environ, STACK)

    def run(self) -> None:
        board = None if self._request else self._open_board()
        while True:
            OWN_PAGE.beat(self._asked())
            if self._request and self._request.exists():
                self._on_stop(self._request.read_text(encoding="utf-8"))
            if self._stack and self._stack.exists() and self._stack.stat().st_size:  # the run hangs
                self._stack = None
                write_flight_record(self._config, self._rank.rank)
            if board and board.decision.report:
                time.sleep(2 * self._interval)  # this rank may host the store that others read
                os._exit(FAILED)
            if self._ended.wait(LOOK_SECONDS):
                break
        OWN_PAGE.stand_in(ENDED)
        OWN_PAGE.beat(self._asked())
        if board:
            if self._rank.rank == 0:  # it may host the store where the others show that they end
                board.is_waiting = True
                wait_until(lambda: _have_ended(board.statuses), BEAT_SECONDS)
            board.end()

    def _open_board(self) -> Board | None:
        """Join the board of all ranks in their own store; rank 0 decides."""
        number = self._rank.rank
        world = self._rank.world
        address = store_address(self._environ, world)
        if address is None:
            return None
        link = Link(*address, prefix=f"{attempt_prefix(self._environ)}board")
        decide = None
        if number == 0:
            link.ask(lambda store: open_board(store, world), self._config.comm.init_timeout_seconds)
            attempt = attempt_number(self._environ)
            hangs = Hangs(self._config, attempt, world, time.monotonic(), self._interval)
            decide = partial(_decide, hangs)
        board = Board(
            link, number, world, Status(), self._look, self._inspect, decide, self._interval
        )
        board.start()
        return board

    def _inspect(self) -> dict[int, Inspection]:
        write_flight_record(self._config, self._rank.rank)
        stack = Path(self._config.job.dump_folder, "logs", f"rank-{self._rank.rank}.stack")
        faulthandler.register(signal.SIGUSR2, stack.open("w"))
        return inspect({self._rank.rank: RankProcess(os.getpid(), stack)})

    def _look(self, status: Status) -> Status:
        beat = replace(beat_of(self._config, OWN_PAGE, self._rank.host), pid=os.getpid())
        return replace(status, beats={self._rank.rank: beat})

    def end(self) -> None:
        """Show that this rank has nothing left to do, and stop beating."""
        self._ended.set()
        self.join(5)


def _have_ended(statuses: Mapping[int, Status]) -> bool:
    for status in statuses.values():
        if any(beat.phase != ENDED for beat in status.beats.values()):
            return False
    return True


def _decide(hangs: Hangs, statuses: Mapping[int, Status], now: float) -> Decision:
    """Return rank 0's decision under torchrun or srun; their agents handle everything but hangs."""
    earlier = hangs.report
    hangs.look(statuses, now)
    # Printed before another rank can read it and exit, which may make this rank fail at once.
    if hangs.report != earlier:
        print(f"titanlite: {hangs.report}", file=sys.stderr, flush=True)
    return Decision(hangs=hangs.is_hung, report=hangs.report)
