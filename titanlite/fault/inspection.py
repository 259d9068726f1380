"""Inspect a rank's process from outside, even if it is stopped or a thread of it holds the GIL."""

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from titanlite.fault.stall import IN_KERNEL, PAUSED
from titanlite.fault.status import Inspection

POLL_SECONDS = 0.1
"""Time between two checks of a launcher on its workers."""
STACK_SECONDS = 2
"""Time for a process to write its stack."""
STATES = {"R": "running", "S": "sleeping", "D": IN_KERNEL, "T": PAUSED, "t": PAUSED, "Z": "gone"}


class RankProcess(NamedTuple):
    """A process whose faulthandler handles SIGUSR2."""

    pid: int
    stack: Path
    """The file where it writes its stack."""


def inspect(processes: Mapping[int, RankProcess]) -> dict[int, Inspection]:
    """Return the state and stack of each rank's process."""
    states = {rank: process_state(each.pid) for rank, each in processes.items()}
    for each in processes.values():
        _ask(each.pid)
    stopped = [each for rank, each in processes.items() if states[rank] == PAUSED]
    _await(each.stack for each in processes.values() if each not in stopped)
    # These answer before they do anything else; the others, which could then continue, have already
    # answered.
    for each in stopped:
        _send(each.pid, signal.SIGCONT)
    _await(each.stack for each in stopped)
    for each in stopped:
        _send(each.pid, signal.SIGSTOP)
    found = dict[int, Inspection]()
    for rank, each in processes.items():
        found[rank] = Inspection(states[rank], _read(each.stack) or _spied(each.pid))
    return found


def process_state(pid: int) -> str:
    """Return the state of the process, by the kernel."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        if os.path.exists("/proc/self/stat"):
            return "gone"
        return "unknown"
    return STATES.get(letter, letter)


def _ask(pid: int) -> None:
    """Send SIGUSR2 to the main thread; in a stopped process, any other would answer too late."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "tgkill"):  # glibc 2.30
        libc.tgkill(pid, pid, signal.SIGUSR2)
    else:
        _send(pid, signal.SIGUSR2)


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _await(files: Iterable[Path]) -> None:
    """Wait until no file is empty, and none is growing."""
    waited = [*files]
    sizes = [0]

    def are_whole() -> bool:
        before = sizes[:]
        sizes[:] = [len(_read(file)) for file in waited]
        return all(sizes) and sizes == before

    wait_until(are_whole, STACK_SECONDS)


def _read(file: Path) -> str:
    return file.read_text(errors="replace") if file.exists() else ""


def _spied(pid: int) -> str:
    """Return the stack of a process that did not answer, if py-spy is installed and permitted to
    read it.
    """
    with suppress(subprocess.SubprocessError, OSError):
        # Without --nonblocking, py-spy would stop the process first.
        command = ["py-spy", "dump", "--nonblocking", "--pid", str(pid)]
        return subprocess.run(command, capture_output=True, text=True, timeout=5).stdout
    return ""


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    """Return when the condition holds, or when the time is up."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.1)
