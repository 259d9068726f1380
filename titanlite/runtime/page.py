"""A rank's page: its process, the place of its main thread, its request to stop and its early exit,
in a mapped file.

One value for the process, with the names of the profiler's regions. The file is readable while the
process is stopped, keeps the GIL, or is dead. No torch before the first phase.
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
"""A page is two halves, written in turn: a process that is stopped or killed while it writes leaves
one whole.
"""
MOST_CHARACTERS = 150


@dataclass(frozen=True)
class EarlyExit:
    """The end of a rank before the target step."""

    code: int
    """STOPPED, or CUT_SHORT if steps are lost."""
    step: int
    """The last complete step; 0 if no rank of this start has come to one."""
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
    """Phases entered so far: the same on ranks that did the same."""
    since: float = field(default_factory=time.monotonic)
    """The start of the phase, by the clock that all processes of a host share."""
    completed: int = 0
    """The last complete step of this rank."""
    saved: int = 0
    """The last step that is in a committed checkpoint, as this rank saw it."""
    first_step: int = 0
    """The first step of this process, which compiles and connects; 0 before it."""
    pid: int = 0
    """The process, once it answers SIGUSR2 with its stack."""
    heartbeat: float = 0.0
    """The last sign of life of a thread, by the same clock as `since`; 0 before the first."""
    asked: str = ""
    """The reason of this rank's stop request."""
    ending: EarlyExit | None = None


_FIELDS = [each.name for each in fields(Page) if each.name != "ending"]


class OwnPage(Page):
    """This process's page. The main thread changes it; other threads only `saved`, `heartbeat`,
    `asked`, `ending`.
    """

    _file: mmap.mmap | None = None
    _lock = threading.Lock()
    _writes = 0

    def share(self, file: Path) -> None:
        """Keep the page in a file too."""
        file.write_bytes(b" " * (2 * HALF_BYTES))
        with file.open("r+b") as opened:
            self._file = mmap.mmap(opened.fileno(), 2 * HALF_BYTES)
        self.pid = os.getpid()
        self.since = time.monotonic()  # a fork has the time of its launcher's imports
        self._write()

    def enter(self, phase: str) -> None:
        """Begin a phase."""
        self.sequence += 1
        self.stand_in(phase)

    def stand_in(self, phase: str) -> None:
        """Be in the phase, without counting it again."""
        self.phase = phase
        self.since = time.monotonic()
        self._write()

    def beat(self, asked: str) -> None:
        """Give a sign of life, and pass on a request to stop."""
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
    """Show this worker's page to its launcher, which signals processes that have one for their
    stacks.
    """
    page, stack = own_file(environ, PAGE), own_file(environ, STACK)
    if page and stack:
        faulthandler.register(signal.SIGUSR2, stack.open("w"))
        OWN_PAGE.share(page)


def read_page(file: Path) -> Page | None:
    """Return a rank's page; None before it is written."""
    try:
        content = file.read_bytes()
    except OSError:
        return None
    whole = []
    for start in (0, HALF_BYTES):
        half = content[start : start + HALF_BYTES].rstrip()
        if half and b"%08x" % crc32(half[8:]) == half[:8]:  # else in the middle of a write
            whole.append(json.loads(half[8:]))
    if not whole:
        return None
    _, values, ending = max(whole)
    return Page(**dict(zip(_FIELDS, values, strict=True)), ending=ending and EarlyExit(**ending))


def read_pages(private: Path) -> dict[int, Page]:
    """Return the pages of this node's workers by rank, as far as they have started."""
    pages = {int(file.stem): read_page(file) for file in private.glob(f"*.{PAGE}")}
    return {rank: page for rank, page in sorted(pages.items()) if page}


def early_exits(private: Path) -> list[EarlyExit]:
    """Return the early exits of this node's workers."""
    return [page.ending for page in read_pages(private).values() if page.ending]


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Name a part of a step, for the profiler too; an error leaves the name as it is, for its
    report.
    """
    from torch.profiler import record_function

    around = OWN_PAGE.phase
    OWN_PAGE.enter(name)
    with record_function(name):
        yield
    OWN_PAGE.stand_in(around)
