"""A rank's page: its process, what its main thread is doing, its stop request and its early exit,
in a memory-mapped file.

There is one page per process. Phases have the names that the profiler shows. The file is readable
even if the process is stopped, holds the GIL, or is dead. Imports no torch before the first phase.
"""

import faulthandler
import json
import mmap
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from zlib import crc32

from titanlite.runtime.rank_files import PAGE, STACK, own_file

HALF_BYTES = 2048
"""A page has two halves, written in turn, so that a process stopped or killed during a write leaves
one of them intact.
"""
MOST_CHARACTERS = 150


@dataclass(frozen=True)
class EarlyExit:
    """The end of a rank before the target step."""

    code: int
    """STOPPED, or CUT_SHORT if steps are lost."""
    step: int
    """The last complete step; 0 if no rank completed one since the start."""
    reason: str
    lost: int
    """Steps since the newest checkpoint."""

    @property
    def order(self) -> tuple[int, bool]:
        """Return a sort key: a saved step first, then the most reliable reason."""
        return self.code, "another rank" in self.reason


@dataclass
class Page:
    """The content of a page."""

    step: int = 0
    phase: str = "start"
    sequence: int = 0
    """Number of phases entered so far; equal on ranks that have done the same."""
    since: float = field(default_factory=time.monotonic)
    """Start of the phase, by the clock that all processes of a host share."""
    completed: int = 0
    """The last complete step of this rank."""
    saved: int = 0
    """The last step in a committed checkpoint, as far as this rank knows."""
    first_step: int = 0
    """The first step of this process, which compiles and connects; 0 before it."""
    pid: int = 0
    """The process id, once the process answers SIGUSR2 with its stack."""
    heartbeat: float = 0.0
    """The last sign of life, by the same clock as `since`; 0 before the first."""
    asked: str = ""
    """The reason of this rank's stop request."""
    ending: EarlyExit | None = None


_FIELDS = [each.name for each in fields(Page) if each.name != "ending"]


class OwnPage(Page):
    """This process's page. Other threads than the main one change only `saved`, `heartbeat`,
    `asked` and `ending`.
    """

    _file: mmap.mmap | None = None
    _lock = threading.Lock()
    _writes = 0

    def share(self, file: Path) -> None:
        """Write the page to a file as well."""
        file.write_bytes(b" " * (2 * HALF_BYTES))
        with file.open("r+b") as opened:
            self._file = mmap.mmap(opened.fileno(), 2 * HALF_BYTES)
        self.pid = os.getpid()
        self.since = time.monotonic()  # a fork still has its launcher's value
        self._write()

    def enter(self, phase: str) -> None:
        """Begin a phase."""
        self.sequence += 1
        self.stand_in(phase)

    def stand_in(self, phase: str) -> None:
        """Set the phase without counting it."""
        self.phase = phase
        self.since = time.monotonic()
        self._write()

    def beat(self, asked: str) -> None:
        """Show a sign of life, and pass on a stop request."""
        self.heartbeat = time.monotonic()
        self.asked = asked[:MOST_CHARACTERS]
        self._write()

    def end(self, ending: EarlyExit) -> None:
        """Record an early exit."""
        self.ending = replace(ending, reason=ending.reason[:MOST_CHARACTERS])
        self._write()

    def _write(self) -> None:
        if self._file is None:
            return
        with self._lock:
            self._writes += 1
            values = [getattr(self, name) for name in _FIELDS]
            ending = vars(self.ending) if self.ending else None
            text = json.dumps([self._writes, values, ending], ensure_ascii=False).encode()
            half = b"%08x" % crc32(text) + text
            assert len(half) <= HALF_BYTES, text
            start = HALF_BYTES * (self._writes % 2)
            self._file[start : start + HALF_BYTES] = half.ljust(HALF_BYTES)


OWN_PAGE = OwnPage()


def share_own_page(environ: Mapping[str, str]) -> None:
    """Share this worker's page with its launcher, which may then signal it for its stack."""
    page = own_file(environ, PAGE)
    stack = own_file(environ, STACK)
    if page and stack:
        faulthandler.register(signal.SIGUSR2, stack.open("w"))
        OWN_PAGE.share(page)


def read_page(file: Path) -> Page | None:
    """Return a rank's page; None if it is not written yet."""
    try:
        content = file.read_bytes()
    except OSError:
        return None
    whole = []
    for start in (0, HALF_BYTES):
        half = content[start : start + HALF_BYTES].rstrip()
        if half and b"%08x" % crc32(half[8:]) == half[:8]:  # otherwise it is being written
            whole.append(json.loads(half[8:]))
    if not whole:
        return None
    _, values, ending = max(whole)
    return Page(**dict(zip(_FIELDS, values, strict=True)), ending=ending and EarlyExit(**ending))


def read_pages(private: Path) -> dict[int, Page]:
    """Return the pages of this node's workers that have started, by rank."""
    pages = {int(file.stem): read_page(file) for file in private.glob(f"*.{PAGE}")}
    return {rank: page for rank, page in sorted(pages.items()) if page}


def early_exits(private: Path) -> list[EarlyExit]:
    """Return the early exits of this node's workers."""
    return [page.ending for page in read_pages(private).values() if page.ending]


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Name a part of a step, also for the profiler; after an error the name stays."""
    from torch.profiler import record_function

    around = OWN_PAGE.phase
    OWN_PAGE.enter(name)
    with record_function(name):
        yield
    OWN_PAGE.stand_in(around)
