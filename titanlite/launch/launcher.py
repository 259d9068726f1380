"""`titanlite train`: check everything, start the workers, own the terminal, return the exit code.

No worker starts before config and machine are checked. After a failure, the launcher names the rank
that failed first and prints its traceback last.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from titanlite.checkpoint import status
from titanlite.checkpoint.manifest import CONFIG, committed, step_folder
from titanlite.checkpoint.root import checkpoint_root
from titanlite.config.job import Job, job_from
from titanlite.config.load import ConfigError, Loaded, load_config, parse_command_line
from titanlite.config.options import KeysHelp
from titanlite.config.resharding import describe_choice, is_to_choose
from titanlite.config.schema import FaultSection
from titanlite.config.toml import to_toml, toml_differences
from titanlite.errors import INTERRUPTED, OK, REFUSED, RunFailed, UserError
from titanlite.launch.nodes import (
    Nodes,
    describe_nodes,
    find_device,
    find_nodes,
    prepare_imports,
    worker_environment,
)
from titanlite.launch.preflight import check_machine, choose_resharding, file_faults
from titanlite.launch.stopping import CTRL_C, Stopped, Stopping
from titanlite.launch.terminal import say
from titanlite.observe import events
from titanlite.observe.console import rank_log
from titanlite.observe.events import record_event
from titanlite.runtime import lock
from titanlite.runtime.cluster import check_torch, read_number, shown_ranks
from titanlite.runtime.rank_files import ATTEMPT, CHOSEN_RESHARD, DEVICE, STOP_SIGNALS
from titanlite.train.ending import describe_end, describe_stop

if TYPE_CHECKING:
    from titanlite.fault.status import Ended, Verdict
    from titanlite.launch.after_save import AfterSave
    from titanlite.launch.attempts import Attempt
    from titanlite.launch.node import Node
    from titanlite.launch.terminal import Terminal
    from titanlite.runtime.forks import ForkServer
    from titanlite.runtime.page import EarlyExit

AS_IT_WAS = "nothing was trained, and the files of the folder are unchanged"
EPILOG = """examples:
  NGPU=2 titanlite train --training.steps 100 --parallelism.tensor_parallel_degree 2
  titanlite train --config llama_8b.toml changes.toml --optimizer.lr 3e-4

VALUE is TOML. A list of text may be comma-separated words, --model.freeze \
norm.weight,output.weight. A switch is --compile.enable (on), --compile.no_enable or \
--compile.enable=false (off). Without --config, train_configs/debug.toml is used; CONFIG_FILE \
names another. Later files override earlier ones, and the command line overrides files. \
Environment: NGPU (processes on this node), LOG_RANK (ranks whose output is shown), NNODES \
NODE_RANK MASTER_ADDR MASTER_PORT (several nodes; SLURM_* and PET_* are understood too).
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare --help; all other options are --config and config keys."""
    parser.set_defaults(takes_overrides=True)
    parser.epilog = EPILOG
    parser.usage = "titanlite train [--config FILE.toml …]\n       [--section.key VALUE …]"
    about = "list every config key, or those that mention WORD"
    parser.add_argument(
        "-h", "--help", nargs="?", const="", metavar="WORD", action=KeysHelp, help=about
    )


def run(arguments: Namespace, argv: list[str]) -> int:
    """Train the job of a command line and return its exit code; raise UserError before any worker
    starts.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # until Stopping handles them
    try:
        return _check_and_run(argv)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _check_and_run(argv: list[str]) -> int:
    # Must be set before torch is imported, or the profiler prints what looks like errors.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    environ = dict(os.environ)
    loaded = load_config(parse_command_line(argv, environ))
    job, nodes, device, processes = find_job(loaded, environ)
    shown = shown_ranks(environ)
    if max(shown) >= job.layout.world:
        raise UserError(
            f"LOG_RANK={environ['LOG_RANK']}, but the ranks are 0 to {job.layout.world - 1}"
        )
    if job.config.fault.min_nodes > nodes.training:
        raise UserError(
            f"fault.min_nodes = {job.config.fault.min_nodes}, "
            f"but the run has {nodes.training} (NNODES)"
        )
    run_lock = Path(job.config.job.dump_folder, lock.RUN_LOCK)
    # On several nodes the lock is taken later, so that the others do not wait for nothing.
    if nodes.count == 1 and os.path.exists(run_lock):
        lock.take(run_lock, f'job.dump_folder = "{job.config.job.dump_folder}"')
    only_imports = prepare_imports(processes, os.environ)
    prepared = check_machine(job, device, processes, nodes.rank == 0, loaded.entries)
    message = status.finished_message(job.config)
    if message:
        say(f"titanlite: {message}")
        others = _of_another_run(job)
        if others:
            say(
                f"titanlite: the finished run had a different {', '.join(others)}; "
                "nothing was trained"
            )
        return OK
    from titanlite.launch.workers import fork_server

    reshard = choose_resharding(job, device)
    forks = fork_server(only_imports, prepared=prepared)
    try:
        stopping = Stopping(job.config)
        launch = Launch(
            argv, loaded, job, nodes, device, processes, shown, stopping, forks, reshard
        )
        return launch.run()
    except Stopped as stopped:  # before any worker started
        return _end_early(job, stopped.early)


def find_job(loaded: Loaded, environ: Mapping[str, str]) -> tuple[Job, Nodes, str, int]:
    """Return the job of a config on this machine, its nodes, the kind of device, and the number of
    workers on this node.
    """
    # A shell's background job inherits an ignored SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    check_torch()
    config = loaded.config
    spare = 0
    if config.checkpoint.enable:
        spare = config.fault.spare_nodes
    nodes = find_nodes(environ, spare)
    read_number(environ, "MAX_RESTARTS", 0)  # checked here, even if the run is already finished
    read_number(environ, "OMP_NUM_THREADS", 1, least=1)  # OpenMP uses all cores if it is invalid
    device, processes = find_device(config.job.device, environ)
    try:
        job = job_from(loaded, world=nodes.training * processes, training=True, device=device)
    except ConfigError as error:
        raise ConfigError([*error.faults, *file_faults(loaded)]) from None
    return job, nodes, device, processes


def _of_another_run(job: Job) -> list[str]:
    """Return the keys of model and data that differ from the newest checkpoint's config."""
    if status.in_bucket(job.config):
        return []
    root = checkpoint_root(job.config)
    saved = step_folder(root, committed(root)[-1]) / CONFIG
    keys = (
        toml_differences(saved.read_bytes().decode(), to_toml(job.given)) if saved.exists() else {}
    )
    return [
        key for key in keys if key.startswith(("model.", "training.dataset", "training.mixture"))
    ]


@dataclass
class Launch:
    """A checked job on this node, from the rendezvous to the exit code."""

    argv: list[str]
    loaded: Loaded
    job: Job
    nodes: Nodes
    device: str
    processes: int
    shown: set[int]
    """The ranks whose output is shown."""
    stopping: Stopping
    forks: ForkServer | None
    reshard: tuple[str, str]
    """What parallelism.fsdp_reshard_after_forward "auto" stands for, and why."""
    moved: set[Path] | None = None
    """Folders in previous/ that this start has created; None until the dump folder is taken."""
    terminal: Terminal | None = None

    @property
    def folder(self) -> Path:
        return Path(self.job.config.job.dump_folder)

    def run(self) -> int:
        """Start the workers, restart them after failures that allow it, and wait for them."""
        from titanlite.launch.workers import Signaled

        try:
            with tempfile.TemporaryDirectory(prefix="titanlite-") as private:
                return self._finish(self._run(Path(private)))
        except OSError as error:  # the disk or the network, rather than a bug
            raise RunFailed(str(error)) from None
        except (KeyboardInterrupt, Signaled) as error:
            return self._end_at_once(getattr(error, "number", signal.SIGINT))

    def _run(self, private: Path) -> Verdict:
        from titanlite.fault.decide import Restarts
        from titanlite.launch.after_save import AfterSave
        from titanlite.launch.attempts import Attempts, leaving, max_restarts, saved_since
        from titanlite.launch.node import Node

        config = self.job.config
        files = ", ".join(parse_command_line(self.argv, os.environ).files)
        count = describe_nodes(self.nodes, self.device, self.processes)
        say(f"titanlite: {count}, config {files}")
        if self.nodes.count == 1 and config.fault.rejoin_seconds != FaultSection().rejoin_seconds:
            say("titanlite: no effect on 1 node: fault.rejoin_seconds")
        if self.nodes.rank == 0:
            lines = [*self.loaded.notices, self.job.no_effect_of(self.loaded.given)]
            if is_to_choose(self.job):
                lines.append(describe_choice(*self.reshard))
            for line in filter(None, lines):
                say(f"titanlite: {line}")
        most = max_restarts(self.loaded, self.job, os.environ)
        restarts = Restarts(most, self._fits, saved_since(config))
        node = Node(
            self.nodes, self.processes, config, private, restarts, lambda: self.stopping.reason
        )
        if self.nodes.spare:
            self.stopping.expect_no_workers()
        with leaving(node):
            decision = node.meet()
            if not decision.is_final:
                self._take_folder()
                decision = node.prepare(decision)
            after_save = AfterSave(self.job.given, self.nodes.rank == 0)
            work = partial(self._work, node, private, after_save)
            verdict = Attempts(node, self.job.given, private, work).run(decision)
            after_save.finish(is_stop=bool(self.stopping.reason))
            return verdict

    def _take_folder(self) -> None:
        archives = {*self.folder.glob("previous/*")}
        if self.nodes.rank == 0:
            message = status.take_folder(self.job.given)
            if message:
                say(f"titanlite: {message}")
        self.moved = {*self.folder.glob("previous/*")} - archives

    def _fits(self, world: int) -> str:
        """Return why the job cannot continue with this many ranks, or an empty string."""
        try:
            smaller = job_from(self.loaded, world=world, training=True, device=self.device)
            check_machine(smaller, self.device, self.processes, first_node=False)
            return ""
        except UserError as error:
            return str(error)

    def _work(
        self, node: Node, private: Path, after_save: AfterSave, attempt: Attempt, watch: Callable
    ) -> Ended:
        """Run this node's workers and show their output; return how the attempt ended."""
        from titanlite.fault.status import Ended
        from titanlite.launch.failure import first_failure
        from titanlite.launch.workers import Workers

        environ = {
            DEVICE: self.device,
            ATTEMPT: str(attempt.number),
            CHOSEN_RESHARD: self._reshard_on(attempt.world),
            **worker_environment(self.nodes, self.processes, os.environ),
        }
        part = to_toml(attempt.config), attempt.ranks, attempt.world, node.address
        workers = Workers(self.argv, *part, self.folder, private, environ, forks=self.forks)

        def poll() -> None:
            watch()
            self.stopping.poll(node)
            after_save.poll()

        self.terminal = self._open_terminal(attempt)
        self.stopping.begin(private)
        try:
            with self.terminal:
                exits, reason = workers.run(poll)
            ended = self.stopping.ended(exits)
            if ended:
                return ended
        except Stopped as stopped:
            ended = self.stopping.ended({}) or Ended(early=stopped.early)
            return replace(ended, over=True)
        finally:
            self.stopping.finish()
        failure = first_failure(exits, self.folder, private, socket.gethostname())
        return Ended(failure, over=bool(failure or reason))

    def _reshard_on(self, world: int) -> str:
        """Return what "auto" stands for on this many ranks; it was planned for all of them."""
        value, _ = self.reshard
        if value == "never" and world < self.job.layout.world:
            value = "default"
            if self.nodes.rank == 0:
                say(f"titanlite: {describe_choice(value, f'not planned on {world} ranks')}")
        return value

    def _open_terminal(self, attempt: Attempt) -> Terminal:
        from titanlite.launch.attempts import shown_here
        from titanlite.launch.terminal import Terminal

        config = self.job.config
        logs = {rank: rank_log(self.folder, rank) for rank in shown_here(self.shown, attempt)}
        color = not config.metrics.disable_color_printing
        seconds = 0.1
        if self.nodes.count > 1:  # spare the file system that all nodes share
            seconds = 1
        metrics = self.folder / "metrics.jsonl"
        return Terminal(logs, metrics, config.training.steps, color, seconds)

    def _finish(self, verdict: Verdict) -> int:
        if verdict.early:
            return _end_early(self.job, verdict.early, self.nodes.rank == 0)
        if verdict.code == REFUSED and self.nodes.count == 1 and self._put_back():
            if self.moved:
                say(f"titanlite: earlier logs were moved back: {AS_IT_WAS}", sys.stderr)
        elif self.nodes.rank == 0:
            how = events.FAILED if verdict.code else events.DONE
            record_event(self.folder, "stop", how=how, why=verdict.cause)
            if verdict.code == OK:
                say(describe_end(self.job.config))
        assert verdict.code is not None
        return verdict.code

    def _end_at_once(self, number: int) -> int:
        """Print the step at which a signal ended the run without a save; return the exit code."""
        step = 0
        if self.terminal:
            step = self.terminal.last_record.get("step", 0)
        kinds = "metrics and logs" if step else "logs"
        files = f"{kinds} are in {self.folder}, {status.last_saved_message(self.job.config)}"
        if not self.folder.exists():
            files = "nothing was written"
        # Logs that ranks have written to may show a hang, and are kept.
        silent = not any(path.stat().st_size for path in (self.folder / "logs").glob("**/rank-*"))
        if silent and self.nodes.count == 1 and self.moved is not None and self._put_back():
            files = AS_IT_WAS
        elif self.nodes.rank == 0:
            record_event(self.folder, "stop", how=events.STOPPED, why=f"at step {step}")
        stopped = f"stopped at step {step} of {self.job.config.training.steps}"
        say(f"\ntitanlite: {stopped}; {files}")
        return INTERRUPTED if number == signal.SIGINT else 128 + number

    def _put_back(self) -> bool:
        return _put_back(self.folder, self.moved or set())


def _end_early(job: Job, early: EarlyExit, records: bool = False) -> int:
    """Print the step at which the run ended on request; return the exit code."""
    by_ctrl_c = early.reason.startswith(CTRL_C)
    end = describe_stop(job.config, early)
    if by_ctrl_c and "; saved: " in end and early.step < job.config.training.steps:
        end += "; the same command continues from there"
    say(f"\ntitanlite: {end}")
    if records:
        record_event(Path(job.config.job.dump_folder), "stop", how=events.STOPPED, why=end)
    return INTERRUPTED if by_ctrl_c else early.code


def _put_back(folder: Path, moved: set[Path]) -> bool:
    """Undo a start's changes to the dump folder unless training began; return whether they were
    undone.
    """
    if (folder / "environment.json").exists():
        return False
    shutil.rmtree(folder / "logs", ignore_errors=True)
    for archive in moved:
        for path in archive.iterdir():
            path.rename(folder / path.name)
        archive.rmdir()
    with suppress(OSError):  # not empty, or never created
        (folder / "previous").rmdir()
    return True
