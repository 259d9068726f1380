"""`titanlite train` and ./run_train.sh: check everything, start the workers, own the terminal, return the exit code.

The workers run under torch's elastic agent. None is started before the config and this machine have been checked.
When a run fails, the rank that failed first is named, with its traceback last.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import socket
import sys
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlite.checkpoint.manifest import CONFIG, committed, step_folder
from titanlite.checkpoint.resume import checkpoint_root, finished_message, last_saved_message, take_folder
from titanlite.config.job import Job, job_from
from titanlite.config.load import ConfigError, load, parse_command_line
from titanlite.config.toml import to_toml, toml_differences
from titanlite.errors import RunFailed, UserError, nearest
from titanlite.launch.nodes import Nodes, count_gpus, count_processes, find_nodes, gpu_name
from titanlite.launch.preflight import check_machine, data_faults, rank_bytes
from titanlite.launch.terminal import say
from titanlite.observe.console import DEVICE, LAUNCHED, rank_log
from titanlite.runtime import lock
from titanlite.runtime.cluster import check_torch, cores, shown_ranks
from titanlite.train.ending import describe_end

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

OK, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130
AS_IT_WAS = "nothing was trained, and the files of the folder are as they were"
EPILOG = """examples:
  NGPU=2 titanlite train --training.steps 100 --parallelism.tensor_parallel_degree 2
  titanlite train --config llama_8b.toml changes.toml --optimizer.lr 3e-4

VALUE is TOML: a list is one word in quotes, --model.freeze '["norm.weight"]'; a switch is --compile.enable (on),
--compile.no_enable or --compile.enable=false (off). Without --config, train_configs/debug.toml is used; CONFIG_FILE
names another. Later files override earlier ones, and the command line overrides files. Environment: NGPU (processes
on this node), LOG_RANK (ranks whose output is shown), NNODES NODE_RANK MASTER_ADDR MASTER_PORT (several nodes;
SLURM_* and PET_* are understood too).
"""


class _KeysHelp(Action):
    """Print --help with every config key, or only the keys that mention a search word."""

    def __call__(self, parser: ArgumentParser, namespace: Namespace, values: Any, option: str | None = None) -> None:
        from titanlite.config.docs import help_text
        from titanlite.config.schema import KEYS

        text = help_text(values)
        if not text:
            close = nearest(values, {part for key in KEYS for part in key.split(".")})
            raise UserError(f"no config key mentions '{values}'" + (f"; did you mean '{close}'?" if close else ""))
        if not values:
            parser.print_help()
            print()
        print(text, end="")
        parser.exit()


def add_arguments(parser: ArgumentParser) -> None:
    """Declare --help; everything else is --config and config keys."""
    parser.set_defaults(takes_overrides=True)
    parser.epilog, parser.usage = EPILOG, "titanlite train [--config FILE.toml …] [--section.key VALUE …]"
    about = "list every config key, or those that mention WORD"
    parser.add_argument("-h", "--help", nargs="?", const="", metavar="WORD", action=_KeysHelp, help=about)


def run(arguments: Namespace, argv: list[str]) -> int:
    """Train the job of a command line and return its exit code; UserError before any worker is started."""
    environ = dict(os.environ)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits an ignored one
    loaded = load(parse_command_line(argv, environ))
    check_torch()
    nodes = find_nodes(environ)
    device, processes = _device_and_processes(loaded.config.job.device, environ)
    world = nodes.count * processes
    try:
        job = job_from(loaded, world=world, training=True, device=device)
    except ConfigError as error:
        raise ConfigError([*error.faults, *data_faults(loaded)]) from None
    shown = shown_ranks(environ)
    if max(shown) >= world:
        raise UserError(f"LOG_RANK={environ['LOG_RANK']}, but the ranks are 0 to {world - 1}")
    run_lock = Path(job.config.job.dump_folder, lock.RUN_LOCK)
    if nodes.count == 1 and os.path.exists(run_lock):  # other nodes would wait in vain, and are told later
        lock.take(run_lock, f'job.dump_folder = "{job.config.job.dump_folder}"')
    check_machine(job, device, processes, first_node=nodes.rank == 0)
    root = checkpoint_root(job.config)
    if message := finished_message(job.config):
        say(f"titanlite: {message}")
        if others := _of_another_run(job, root):
            say(f"titanlite: that run had another {', '.join(others)}; nothing was trained")
        return OK
    with _plan(job, nodes, device, processes) as notices:
        return _run(job, argv, nodes, device, processes, shown, notices)


def _of_another_run(job: Job, root: Path) -> list[str]:
    """Return the keys of the model and the data that differ from those of the newest checkpoint."""
    saved = step_folder(root, committed(root)[-1]) / CONFIG
    keys = toml_differences(saved.read_text(encoding="utf-8"), to_toml(job.given)) if saved.exists() else {}
    return [key for key in keys if key.startswith(("model.", "training.dataset", "training.mixture"))]


def _device_and_processes(choice: str, environ: Mapping[str, str]) -> tuple[str, int]:
    """Return the kind of device that job.device stands for, and the number of workers on this node."""
    gpus = 0 if choice == "cpu" else count_gpus(environ)
    if choice == "cuda" and not gpus:
        hidden = environ.get("CUDA_VISIBLE_DEVICES")
        why = "there is no /dev/nvidia*" if hidden is None else f'CUDA_VISIBLE_DEVICES="{hidden}"'
        raise UserError(f'job.device = "cuda", but this node has no GPU ({why}); on the CPU: --job.device cpu')
    device = "cuda" if choice == "cuda" or (choice == "auto" and gpus) else "cpu"
    processes = count_processes(environ, device, gpus)
    if device == "cuda" and processes > gpus:
        raise UserError(f"NGPU={processes}, but this node has {gpus} GPUs; on the CPU: --job.device cpu")
    return device, max(1, processes)


def _plan(job: Job, nodes: Nodes, device: str, processes: int) -> AbstractContextManager[Callable[[], list[str]]]:
    """Plan a step of the job in the background; yield what returns the lines about it when they are known."""
    if not job.config.job.plan or nodes.rank > 0:
        return nullcontext(list)
    from titanlite.launch.background import BackgroundLines

    return BackgroundLines(partial(_planned_lines, job, device, processes))


def _planned_lines(job: Job, device: str, processes: int) -> Sequence[str]:
    from titanlite.planner.start import start_lines  # in the child: the workers' start does not wait for it

    gpu = gpu_name() if device == "cuda" else ""
    return start_lines(job, gpu, rank_bytes(job, device, processes), processes)


def _run(
    job: Job,
    argv: list[str],
    nodes: Nodes,
    device: str,
    processes: int,
    shown: set[int],
    notices: Callable[[], list[str]],
) -> int:
    """Start the workers and wait for them."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from titanlite.launch.elastic import run_workers
    from titanlite.launch.rendezvous import NodeRendezvous
    from titanlite.launch.terminal import Terminal

    folder, steps = Path(job.config.job.dump_folder), job.config.training.steps
    first = nodes.rank * processes
    logs = {rank: rank_log(folder, rank) for rank in range(first, first + processes) if rank in shown}
    logs = logs or {first: rank_log(folder, first)}
    color = not job.config.metrics.disable_color_printing
    terminal = Terminal(logs, folder / "metrics.jsonl", steps, color, notices)
    moved: set[Path] | None = None
    try:
        say(f"titanlite: {_describe_start(nodes, device, processes, os.environ)}")
        rendezvous = NodeRendezvous(nodes, processes, job.config.comm.init_timeout_seconds)
        archives = {*folder.glob("previous/*")}
        if nodes.rank == 0 and (message := take_folder(job.given)):
            say(f"titanlite: {message}")
        moved = {*folder.glob("previous/*")} - archives
        rendezvous.wait_for_node_0("the dump folder")
        worker_environ = {DEVICE: device, **_worker_environment(nodes, processes, os.environ)}
        with terminal:
            run_workers(argv, to_toml(job.given), rendezvous, processes, folder, worker_environ)
    except OSError as error:  # the disk or the network, rather than a bug
        raise RunFailed(str(error)) from None
    except ChildFailedError as error:
        code = _report(error.failures, folder, set(logs))
        if code == REFUSED and nodes.count == 1 and moved is not None and _put_back(folder, moved) and moved:
            print(f"titanlite: {AS_IT_WAS}", file=sys.stderr)
        return code
    except (KeyboardInterrupt, SignalException) as error:
        number = getattr(error, "sigval", signal.SIGINT)
        step = terminal.last_record.get("step", 0)
        files = f"{'metrics and ' * bool(step)}logs are in {folder}, {last_saved_message(job.config)}"
        silent = not any(path.stat().st_size for path in (folder / "logs").glob("*"))  # else they may show a hang
        if silent and nodes.count == 1 and moved is not None and _put_back(folder, moved):
            files = AS_IT_WAS
        say(f"\ntitanlite: stopped at step {step} of {steps}; {files}")
        return INTERRUPTED if number == signal.SIGINT else 128 + number
    say(describe_end(job.config))
    return OK


def _describe_start(nodes: Nodes, device: str, processes: int, environ: Mapping[str, str]) -> str:
    """Return the number of processes to start, and the variables it comes from."""
    count = f"{processes} process{'es' if processes > 1 else ''} on the {'GPUs' if device == 'cuda' else 'CPU'}"
    reason = "from NGPU" if environ.get("NGPU") else "NGPU sets another number"
    node = f"; node {nodes.rank} of {nodes.count}, from {nodes.source}" if nodes.count > 1 else ""
    return f"{count} ({reason}){node}"


def _worker_environment(nodes: Nodes, processes: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are added for workers: the launcher's process id, and defaults for unset ones."""
    defaults = {
        "OMP_NUM_THREADS": str(max(1, cores() // processes)),
        "PYTHONUNBUFFERED": "1",
        "PYTHONWARNINGS": "ignore:resource_tracker:UserWarning",  # what a stopped loader leaves, the system frees
    }
    if "PYTORCH_CUDA_ALLOC_CONF" not in environ:  # the older name of the next one
        defaults["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    if nodes.count == 1:  # a laptop's host name need not resolve
        defaults["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    return {LAUNCHED: str(os.getpid())} | {name: value for name, value in defaults.items() if name not in environ}


def _put_back(folder: Path, moved: set[Path]) -> bool:
    """Undo what a start did to the dump folder, unless it began to train there; return whether it was undone."""
    if (folder / "environment.json").exists():
        return False
    shutil.rmtree(folder / "logs", ignore_errors=True)
    for archive in moved:
        for path in archive.iterdir():
            path.rename(folder / path.name)
        archive.rmdir()
    with suppress(OSError):  # it holds others, or never was
        (folder / "previous").rmdir()
    return True


def _report(failures: Mapping[int, ProcessFailure], folder: Path, shown: set[int]) -> int:
    """Print which rank failed first, with its message or traceback last, and return the exit code.

    What the user can correct is one message, which the terminal has shown if a shown rank found it too.
    """
    first_seen = min(failure.timestamp for failure in failures.values())
    # The elastic agent ends the other ranks by SIGTERM, and 30 seconds later those that are still there by SIGKILL.
    late = (rank for rank, failure in failures.items() if failure.timestamp - first_seen > 15)
    unresponsive = [rank for rank in late if failures[rank].exitcode == -signal.SIGKILL]

    def failed_at(rank: int) -> float:
        """A killed rank writes no error file, and sorts before ranks that may only have lost it as a peer; a rank
        that the elastic agent ended because of another sorts last."""
        message = failures[rank].message
        if isinstance(message, dict):
            return message["extraInfo"].get("time", 0.0)
        return math.inf if failures[rank].exitcode == -signal.SIGTERM or rank in unresponsive else 0.0

    rank = min(failures, key=failed_at)
    message, exitcode, reason, was_shown = failures[rank].message, failures[rank].exitcode, "", False
    if isinstance(message, dict):
        details = message["extraInfo"]
        reason = message["message"].partition(": ")[2]
        text = reason if details.get("is_user_error") else details["py_callstack"].rstrip()
        found = {other: failure.message for other, failure in failures.items()}
        same = {other for other, m in found.items() if isinstance(m, dict) and m["message"] == message["message"]}
        exitcode = max(failures[other].exitcode for other in same)  # the agent may have ended some meanwhile
        was_shown = text == reason and bool(same & shown)
    else:
        log_tail = rank_log(folder, rank).read_text(errors="replace").splitlines()[-20:]
        text = "\n".join([*log_tail, f"exited without a traceback ({message or f'exit code {exitcode}'})"])
    failed = f"rank {rank} on {socket.gethostname()} failed first"
    if text != reason:
        failed += f"; its log: {rank_log(folder, rank)}"
    if unresponsive:
        failed += f"\nrank {', '.join(map(str, unresponsive))} hung or was stopped: it had to be killed"
    if not was_shown:
        print(f"\ntitanlite: {failed}\n{text}", file=sys.stderr)
    return REFUSED if exitcode == REFUSED else FAILED
