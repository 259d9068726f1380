"""Where this rank's main thread is: the step, the phase of it, and a count that moves with every phase.

One value for the process, like the profiler's regions, whose names are the same. Each rank tells it to the launchers,
which name the rank that is behind when a run hangs.
"""

import json
import mmap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from torch.profiler import record_function

PLACE_BYTES = 200


@dataclass
class Progress:
    """Read by other threads, and changed by the main thread only; `saved` by that of a save."""

    step: int = 0
    phase: str = "start"
    sequence: int = 0
    """Phases entered so far: the same on ranks that did the same."""
    since: float = field(default_factory=time.monotonic)
    first_step: int = 0
    """The first step of this process, which compiles and connects; 0 before it."""
    taken: int = 0
    """The last step that is complete on this rank."""
    saved: int = 0
    """The last step that is in a committed checkpoint, as far as this rank knows."""
    _page: mmap.mmap | None = None

    def enter(self, phase: str) -> None:
        self.sequence += 1
        self.stand_in(phase)

    def stand_in(self, phase: str) -> None:
        """Be in the phase, without counting it again."""
        self.phase, self.since = phase, time.monotonic()
        if self._page:
            text = json.dumps([self.step, phase, self.sequence, self.since, self.taken]).encode()
            self._page[:PLACE_BYTES] = text[:PLACE_BYTES].ljust(PLACE_BYTES)

    def share(self, file: Path) -> None:
        """Keep the place in a file too, where others see it even if this process is stopped or keeps the GIL."""
        file.write_bytes(b" " * PLACE_BYTES)
        with file.open("r+b") as opened:
            self._page = mmap.mmap(opened.fileno(), PLACE_BYTES)
        self.stand_in(self.phase)


PROGRESS = Progress()


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Name a part of a step, for the profiler too; an error leaves the name as it is, to say where it happened."""
    around = PROGRESS.phase
    PROGRESS.enter(name)
    with record_function(name):
        yield
    PROGRESS.stand_in(around)
