"""This node's workers: one process per rank, each with its own session and log file.

Imports no torch.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from titanlite.errors import RunFailed
from titanlite.fault.inspection import POLL_SECONDS, process_state
from titanlite.fault.stall import PAUSED
from titanlite.launch.failure import Exit
from titanlite.launch.terminal import say
from titanlite.observe.console import rank_log
from titanlite.runtime.forks import CannotFork, Child, ForkServer
from titanlite.runtime.rank_files import ERROR, RESOLVED_CONFIG, rank_file

if TYPE_CHECKING:
    from titanlite.train.prepared import Prepared

Process = subprocess.Popen[bytes] | Child
NO_FORKS = "titanlite: ranks start as new interpreters: {}"
PATIENCE_SECONDS = 2
"""Time between SIGINT and SIGKILL, and for a killed process to disappear."""
CRASHES = [
    -number
    for number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
]
"""Exit codes that are never the launcher's doing, even if the rank ended after others had failed
(it may have been writing its core).
"""


class Signaled(BaseException):
    """A signal that ends the launcher and its workers."""

    def __init__(self, number: int) -> None:
        self.number = signal.Signals(number)
        super().__init__(self.number.name)


@dataclass(frozen=True)
class Workers:
    """The workers of this node in one attempt."""

    argv: Sequence[str]
    """The command line, shown in process lists; the workers read `config`."""
    config: str
    """The resolved config; the files named in `argv` may change."""
    ranks: range
    world: int
    address: tuple[str, int]
    """Host and port of the store of all ranks."""
    folder: Path
    """The dump folder, for logs/rank-N.log."""
    private: Path
    """Folder for the config and the files of runtime/rank_files.py."""
    environ: Mapping[str, str]
    module: str = "titanlite.train"
    forks: ForkServer | None = None
    """Forks workers that need no imports; without it, each worker is a new interpreter."""

    def run(self, poll: Callable[[], None]) -> tuple[dict[int, Exit], RunFailed | None]:
        """Run until all workers are done or one has failed; return their exits, and the error of
        `poll` if that ended them. A signal raises Signaled."""
        (self.private / "config.toml").write_text(self.config, encoding="utf-8")
        _raise_on_signals()
        processes: dict[int, Process] = {}
        ending = signal.SIGKILL  # to a rank SIGTERM is a request to save and stop
        reason = None
        try:
            for rank in self.ranks:
                processes[rank] = self._start(rank)
            while not _are_over(processes.values()):
                poll()
                time.sleep(POLL_SECONDS)
        except RunFailed as error:
            reason = error
        except Signaled as signaled:
            if signaled.number != signal.SIGTERM:
                ending = signaled.number
            raise
        finally:
            exits = _end(processes, ending)
        return exits, reason

    def _start(self, rank: int) -> Process:
        log = rank_log(self.folder, rank)
        log.parent.mkdir(parents=True, exist_ok=True)
        host, port = self.address
        environ = {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_RANK": str(rank - self.ranks.start),
            "LOCAL_WORLD_SIZE": str(len(self.ranks)),
            "GROUP_RANK": str(self.ranks.start // len(self.ranks)),
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # node 0's launcher hosts it
            "TORCHELASTIC_ERROR_FILE": str(rank_file(self.private, rank, ERROR)),
            RESOLVED_CONFIG: str(self.private / "config.toml"),
        }
        variables = {**os.environ, **self.environ, **environ}
        # Blocked until the worker handles it: a starting interpreter would print a traceback.
        held = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            with log.open("wb") as output:  # the worker redirects its stdout to its stderr
                forked = self._fork(variables, output)
                if forked:
                    return forked
                return subprocess.Popen(
                    [sys.executable, "-m", self.module, *self.argv],
                    env=variables,
                    stdout=subprocess.DEVNULL,
                    stderr=output,
                    start_new_session=True,
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)

    def _fork(self, variables: Mapping[str, str], output: BinaryIO) -> Process | None:
        """Return a forked worker, or None if forking is not safe."""
        if not self.forks or self.forks.fault:
            return None
        try:
            with open(os.devnull, "r+b") as null:
                files = null.fileno(), null.fileno(), output.fileno()
                return self.forks.start(self.argv, variables, files)
        except CannotFork as error:
            say(NO_FORKS.format(error))
            return None


def fork_server(
    only_imports: set[str], task: Any = None, prepared: Prepared | None = None
) -> ForkServer | None:
    """Return a server that forks workers from this process, which has no threads yet; None if
    forking is not safe.

    The variables that were only for the imports are unset; the other arguments are for
    train.__main__.main.
    """
    from titanlite.train import worker  # noqa: F401  (so that each fork has it)
    from titanlite.train.__main__ import main as work

    try:
        return ForkServer(partial(work, task, prepared))
    except CannotFork as error:
        if sys.platform == "linux":
            say(NO_FORKS.format(error))
        return None
    finally:
        for name in only_imports:
            del os.environ[name]


def _raise_on_signals() -> None:
    """Make signals raise Signaled, except those that request a stop, and SIGHUP under nohup."""

    def raise_signaled(number: int, _: Any) -> None:
        raise Signaled(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGQUIT, signal.SIGHUP):
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, raise_signaled)


def _are_over(processes: Iterable[Process]) -> bool:
    codes = [process.poll() for process in processes]
    return any(codes) or None not in codes


def _end(processes: Mapping[int, Process], ending: signal.Signals) -> dict[int, Exit]:
    """End the workers that are still running, and what they have forked, such as data loaders;
    return the exits.
    """
    running = {}
    for rank, process in processes.items():
        if process.poll() is None:
            running[rank] = process
    now = time.time()
    stopped = {}
    for rank, process in running.items():
        stopped[rank] = process_state(process.pid) == PAUSED
    for number in (ending, signal.SIGKILL):
        for process in running.values():
            if process.poll() is None:
                kill_group(process.pid, number)
        _wait(running.values())
    exits: dict[int, Exit] = {}
    for rank, process in processes.items():
        code = process.poll()
        ended = rank in running and code not in CRASHES
        # Without a code it is stuck in the kernel.
        exits[rank] = Exit(code, now, ended, ended and (stopped[rank] or code is None))
    _kill_groups([process.pid for process in processes.values()])
    return exits


def _wait(processes: Iterable[Process]) -> None:
    """Wait for processes, but only for a while: one that waits for a device in the kernel cannot be
    killed.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))


def _kill_groups(groups: list[int]) -> None:
    """Kill the remaining processes of groups, and wait for them, since they may hold GPU memory."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while groups and time.monotonic() < deadline:
        for group in groups:
            with suppress(ChildProcessError):  # orphans of ranks become the launcher's children
                os.waitpid(-group, os.WNOHANG)
        groups = [group for group in groups if kill_group(group)]
        time.sleep(0.02)


def kill_group(group: int, number: signal.Signals = signal.SIGKILL) -> bool:
    """Signal a process group; return whether it has a process."""
    try:
        os.killpg(group, number)
        return True
    except (ProcessLookupError, PermissionError):
        return False
