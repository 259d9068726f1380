"""`titanlite train` and ./run_train.sh: check everything, start the workers, own the terminal, return the exit code.

The workers run under torch's elastic agent. No worker exists before the whole config and this machine were found
fit; what fails later is told by the first rank that failed, its traceback last.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from titanlite.checkpoint.resume import finished_message, last_saved_message, make_way
from titanlite.config.job import Job, job_from
from titanlite.config.load import CommandLine, ConfigError, load, parse_command_line
from titanlite.errors import UserError
from titanlite.launch.preflight import check_machine
from titanlite.observe.console import LAUNCHED, rank_log
from titanlite.runtime import cluster
from titanlite.runtime.cluster import Nodes, check_torch

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

OK, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130


def launch(argv: list[str]) -> int:
    """Train as the command line asks; the job's exit code."""
    environ = dict(os.environ)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits an ignored one
    try:
        line = parse_command_line(argv, environ)
        check_torch()
        nodes = cluster.nodes(environ)
        device, processes = _device_and_processes(line, environ)
        world = nodes.count * processes
        job = job_from(line, world=world, training=True)
        shown = cluster.shown_ranks(environ)
        if max(shown) >= world:
            raise UserError(f"LOG_RANK={environ['LOG_RANK']}, but the ranks are 0 to {world - 1}")
        check_machine(job, device, processes)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return REFUSED
    except UserError as error:
        print(f"titanlite: {error}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        print("titanlite: stopped before any worker was started", file=sys.stderr)
        return INTERRUPTED
    if news := finished_message(job.config):
        print(f"titanlite: {news}")
        return OK
    return _run(job, argv, nodes, device, processes, shown, environ)


def _device_and_processes(line: CommandLine, environ: Mapping[str, str]) -> tuple[str, int]:
    """The kind of device, and the workers on this node."""
    choice = load(line).config.job.device
    gpus = 0 if choice == "cpu" else cluster.gpus(environ)
    device = "cuda" if choice == "cuda" or (choice == "auto" and gpus) else "cpu"
    processes = cluster.processes(environ, device, gpus)
    if device == "cuda" and processes > gpus:
        raise UserError(f"NGPU={processes}, but this node has {gpus} GPUs; on the CPU: --job.device cpu")
    return device, max(1, processes)


def _run(
    job: Job, argv: list[str], nodes: Nodes, device: str, processes: int, shown: set[int], environ: Mapping[str, str]
) -> int:
    """Start the workers and wait for them."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from titanlite.launch.elastic import run_workers
    from titanlite.launch.rendezvous import NodeRendezvous
    from titanlite.launch.terminal import Terminal

    folder = Path(job.config.job.dump_folder)
    first = nodes.rank * processes
    here = sorted(shown.intersection(range(first, first + processes))) or [first]
    terminal = Terminal(
        {rank: rank_log(folder, rank) for rank in here},
        folder / "metrics.jsonl",
        job.config.training.steps,
        color=not job.config.metrics.disable_color_printing,
    )
    try:
        print(f"titanlite: {_describe_start(nodes, device, processes, environ)}", flush=True)
        roll_call = NodeRendezvous(nodes, processes, job.config.comm.init_timeout_seconds)
        if nodes.rank == 0 and (news := make_way(job.config)):
            print(f"titanlite: {news}", flush=True)
        roll_call.wait_for("folder", done_here=nodes.rank == 0)
        terminal.start()
        run_workers(
            [*argv, f"--job.device={device}"],
            roll_call,
            nodes.count,
            processes,
            folder,
            _worker_environment(nodes, processes, environ),
        )
    except (UserError, OSError) as error:
        print(f"titanlite: {error}", file=sys.stderr)
        return FAILED
    except ChildFailedError as error:
        terminal.stop()
        return _report(error.failures, folder)
    except (KeyboardInterrupt, SignalException) as error:
        terminal.stop()
        number = getattr(error, "sigval", signal.SIGINT)
        reached = terminal.last_record.get("step", 0)
        print(
            f"\ntitanlite: stopped at step {reached} of {job.config.training.steps}; "
            f"metrics and logs are in {folder}, {last_saved_message(job.config)}"
        )
        return INTERRUPTED if number == signal.SIGINT else 128 + number
    terminal.stop()
    _print_summary(job, folder)
    return OK


def _describe_start(nodes: Nodes, device: str, processes: int, environ: Mapping[str, str]) -> str:
    """How many processes, and which variables said so."""
    count = f"{processes} process{'es' if processes > 1 else ''} on the {'GPUs' if device == 'cuda' else 'CPU'}"
    by = "from NGPU" if "NGPU" in environ else "NGPU sets another number"
    where = f"; node {nodes.rank} of {nodes.count}, from {nodes.source}" if nodes.count > 1 else ""
    return f"{count} ({by}){where}"


def _worker_environment(nodes: Nodes, processes: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that workers get: who launched them, and others unless they are set."""
    wanted = {
        "OMP_NUM_THREADS": str(max(1, cluster.cores() // processes)),
        "PYTHONUNBUFFERED": "1",
        "PYTHONWARNINGS": "ignore:resource_tracker:UserWarning",  # what a stopped loader leaves, the system frees
    }
    if "PYTORCH_CUDA_ALLOC_CONF" not in environ:  # the older name of the next one
        wanted["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    if nodes.count == 1:  # a laptop's host name need not resolve
        wanted["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    return {LAUNCHED: str(os.getpid())} | {name: value for name, value in wanted.items() if name not in environ}


def _report(failures: Mapping[int, ProcessFailure], folder: Path) -> int:
    """Print who failed first, with its traceback last; return the exit code."""

    def when(rank: int) -> float:
        """A rank that was killed left no word, and comes before those that may only have lost it; a rank that was
        terminated was so by the elastic agent, because of another."""
        message = failures[rank].message
        if isinstance(message, dict):
            return message["extraInfo"].get("time", 0.0)
        return math.inf if failures[rank].exitcode == -signal.SIGTERM else 0.0

    rank = min(failures, key=when)
    message = failures[rank].message
    who = f"rank {rank} on {socket.gethostname()} failed first; its log: {rank_log(folder, rank)}"
    if isinstance(message, dict):
        details = message["extraInfo"]
        is_user_error = details.get("is_user_error", False)
        text = message["message"].partition(": ")[2] if is_user_error else details["py_callstack"].rstrip()
    else:
        tail = rank_log(folder, rank).read_text(errors="replace").splitlines()[-20:]
        text = "\n".join([*tail, f"it left no word: {message or f'exit code {failures[rank].exitcode}'}"])
    print(f"\ntitanlite: {who}\n{text}", file=sys.stderr)
    return REFUSED if failures[rank].exitcode == REFUSED else FAILED


def _print_summary(job: Job, folder: Path) -> None:
    """Where everything lies, and what to type next."""
    config = job.config
    rows = {"metrics": folder / "metrics.jsonl", "config": folder / "config.toml", "logs": folder / "logs"}
    lines = [f"{name:<12} {path}" for name, path in rows.items()]
    if config.metrics.enable_tensorboard:
        command = shutil.which("tensorboard") and "tensorboard" or Path(sys.executable).parent / "tensorboard"
        lines.append(f"TensorBoard  {command} --logdir {folder / config.metrics.save_tb_folder}")
    if config.profiling.enable_profiling:
        lines.append(f"traces       {folder / config.profiling.save_traces_folder}, for https://ui.perfetto.dev")
    train = "./run_train.sh" if Path("run_train.sh").exists() else "titanlite train"
    lines.append(f"next         {train} --help lists every key; train_configs/debug.toml is a config to begin with")
    print("\n  ".join([f"\ntitanlite: step {config.training.steps} reached", *lines]))
