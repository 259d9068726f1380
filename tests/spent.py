"""The processor time that a process and all its descendants have used."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


def processor_seconds() -> float:
    """Return those of this process, of its living descendants, and of all that they have awaited.

    Without /proc there are no descendants.
    """
    children: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            fields = path.read_text().rpartition(")")[2].split()
            seconds = sum(map(int, fields[11:15])) / TICKS  # utime, stime, cutime, cstime
            children[int(fields[1])].append((int(path.parent.name), seconds))

    def below(pid: int) -> Iterator[float]:
        for child, seconds in children[pid]:
            yield seconds
            yield from below(child)

    return sum(os.times()[:4]) + sum(below(os.getpid()))
