"""This node's workers under torch's elastic agent: one process per rank, each with its own log file.

The agent knows this node only: the launchers agree among themselves who takes part in an attempt and how it ended.
"""

import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from titanlite.errors import RunFailed
from titanlite.fault.inspection import HELD, process_state
from titanlite.launch.failure import Exit
from titanlite.launch.rendezvous import NodeRendezvous
from titanlite.observe.console import rank_log
from titanlite.runtime.rank_files import ERROR, RESOLVED_CONFIG, rank_file

PATIENCE_SECONDS = 2
"""From SIGINT to SIGKILL, and until what was killed is gone."""
CRASHES = [-number for number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)]
"""Exit codes that the launcher does not cause, also where a rank still wrote its core when others had failed."""


class RankLogs(LogsSpecs):
    """One logs/rank-N.log in the dump folder per rank, and one private file per rank for the error it raises."""

    def __init__(self, ranks: range, world: int, folder: Path, private: Path) -> None:
        super().__init__()
        self._ranks, self._world, self._folder, self._private = ranks, world, folder, private

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        destination = LogsDest()
        for local_rank, env in envs.items():
            rank = self._ranks[local_rank]
            log = rank_log(self._folder, rank)
            log.parent.mkdir(parents=True, exist_ok=True)
            destination.error_files[local_rank] = str(rank_file(self._private, rank, ERROR))
            env["TORCHELASTIC_ERROR_FILE"] = destination.error_files[local_rank]
            env["RANK"], env["WORLD_SIZE"] = str(rank), str(self._world)  # among all nodes
            destination.stdouts[local_rank] = os.devnull  # the worker joins its stdout to its stderr
            destination.stderrs[local_rank] = str(log)
        return destination

    @property
    def root_log_dir(self) -> str:
        return str(self._folder)


def run_workers(
    argv: list[str],
    config: str,
    rendezvous: NodeRendezvous,
    ranks: range,
    world: int,
    folder: Path,
    private: Path,
    extra_environ: Mapping[str, str],
    module: str = "titanlite.train",
) -> tuple[dict[int, Exit], RunFailed | None]:
    """Run this node's `ranks` until all have ended; return how, and the error of a poll that ended them, if any.

    They read the resolved `config`, since the files that `argv` names may change; `argv` is for people. `private`
    holds that config and the files of runtime/rank_files.py. A signal raises SignalException.
    """
    for name in list(logging.root.manager.loggerDict):  # the launcher prints its own messages
        if name.startswith("torch.distributed.elastic"):  # each logger: they ignore their parent's level
            logging.getLogger(name).setLevel(logging.CRITICAL)
    rendezvous_handler_registry.register("titanlite", rendezvous.for_agent)  # the same one for every attempt
    signals = ["SIGQUIT"]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):  # others ask to save and stop
            signals.append(number.name)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores it, and a handler would undo that
        signals.append("SIGHUP")
    resolved = private / "config.toml"
    resolved.write_text(config, encoding="utf-8")
    os.environ.update({**extra_environ, RESOLVED_CONFIG: str(resolved)})
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=len(ranks),
        logs_specs=RankLogs(ranks, world, folder, private),
        run_id=rendezvous.run_id,
        rdzv_backend=rendezvous.get_backend(),
        max_restarts=0,  # by the agent: it would not ask why they failed
        monitor_interval=0.1,
        signals_to_handle=",".join(signals),
    )
    with _recorded_exits(ranks) as exits:
        try:
            elastic_launch(launch, sys.executable)("-m", module, *argv)
        except ChildFailedError:
            pass
        except RunFailed as error:
            return exits, error
    return exits, None


@contextmanager
def _recorded_exits(ranks: range) -> Iterator[dict[int, Exit]]:
    """Yield how the workers end, and let nothing of them outlive the attempt.

    Torch asks the ranks that are left to end by SIGTERM, and kills them 30 seconds later. To ours SIGTERM is a
    request to save and stop, which one that can't take a step would pass on to the next attempt: they are killed at
    once. What a killed rank has forked, such as data loaders, stays in its process group.
    """
    exits: dict[int, Exit] = {}
    close = SubprocessContext.close

    def close_soon(context: SubprocessContext, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        processes = {ranks[local]: handler.proc for local, handler in context.subprocess_handlers.items()}
        running = {rank: process for rank, process in processes.items() if process.poll() is None}
        now, stopped = time.time(), {rank: process_state(process.pid) in HELD for rank, process in running.items()}
        ending = signal.SIGKILL if death_sig in (None, signal.SIGTERM) else death_sig
        close(context, ending, min(timeout, PATIENCE_SECONDS))
        for rank, process in processes.items():
            code = process.poll()
            ended = rank in stopped and code not in CRASHES
            exits.setdefault(rank, Exit(code, now, ended, ended and stopped[rank]))
        _kill_groups([process.pid for process in processes.values()])

    SubprocessContext.close = close_soon  # type: ignore[method-assign]
    try:
        yield exits
    finally:
        SubprocessContext.close = close  # type: ignore[method-assign]


def _kill_groups(groups: list[int]) -> None:
    """Kill what is left of process groups, and wait for it: it may hold memory of the GPU."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while groups and time.monotonic() < deadline:
        groups = [group for group in groups if kill_group(group)]
        time.sleep(0.02)


def kill_group(group: int) -> bool:
    """Return whether there was something to kill."""
    try:
        os.killpg(group, signal.SIGKILL)
        return True
    except (ProcessLookupError, PermissionError):
        return False
