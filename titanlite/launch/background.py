"""Lines that a child process computes while the workers start: at the lowest priority, and nothing
waits for them.
"""

import os
import resource
import signal
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

from titanlite.config.job import Job
from titanlite.launch.nodes import Nodes, gpu_name
from titanlite.launch.preflight import rank_bytes
from titanlite.runtime.parent import exit_with_parent

CPU_SECONDS = 60
"""Time limit of the child, which is killed then: its lines would come too late."""


def planned_in_background(
    job: Job, nodes: Nodes, device: str, processes: int
) -> AbstractContextManager[Callable[[], list[str]]]:
    """Plan a step of the job in the background; yield what returns the lines about it when they are
    known.
    """
    asked = job.config.job.plan
    if nodes.rank > 0 or not (device == "cuda" if asked is None else asked):
        return nullcontext(list)
    return BackgroundLines(partial(_planned_lines, job, device, processes))


def _planned_lines(job: Job, device: str, processes: int) -> Sequence[str]:
    # In the child: the workers' start does not wait for it.
    from titanlite.planner.plan import start_lines

    gpu = gpu_name() if device == "cuda" else ""
    return start_lines(job, gpu, rank_bytes(job, device, processes), processes)


class BackgroundLines:
    """Inside `with`, a fork of this process, which has imported torch already, runs a function that
    returns lines.

    A process, since a thread has neither a priority nor limits of its own. If the function fails,
    there are no lines."""

    def __init__(self, compute: Callable[[], Sequence[str]]) -> None:
        self._compute = compute

    def __enter__(self) -> Callable[[], list[str]]:
        self._pipe, write = os.pipe()
        launcher = os.getpid()
        self._child = os.fork()
        if not self._child:
            _run_child(self._compute, write, launcher)
        os.close(write)
        os.set_blocking(self._pipe, False)
        return self._lines

    def __exit__(self, *error: object) -> None:
        if self._child:
            os.kill(self._child, signal.SIGKILL)
            os.waitpid(self._child, 0)
        os.close(self._pipe)

    def _lines(self) -> list[str]:
        """Return the lines when they are there, once, and otherwise none."""
        try:
            text = os.read(self._pipe, 1 << 16) if self._child else b""
        except BlockingIOError:
            return []
        if self._child and not text:
            os.waitpid(self._child, 0)
            self._child = 0
        return text.decode().splitlines()


def _run_child(compute: Callable[[], Sequence[str]], pipe: int, launcher: int) -> NoReturn:
    """Write the lines into the pipe by one call, and nothing anywhere else."""
    with suppress(BaseException):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        os.nice(19)
        os.setsid()
        with suppress(OSError):  # Linux may share the processor by sessions first
            Path("/proc/self/autogroup").write_text("19")
        # The signal of the next limit would write one.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
        nowhere = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(nowhere, standard)
        exit_with_parent(pid=launcher)
        os.write(pipe, "\n".join(compute()).encode())
    os._exit(0)
