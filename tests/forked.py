"""Whole runs without the seconds of their imports: `Forked` is a subprocess.Popen of `python -m
MODULE …` whose process is a fork of one that has imported everything, and becomes a child of this
one.

What an interpreter reads before `main` is that of the process which is forked: a run that needs
other variables of this kind, or is about the start of an interpreter, is a real process."""

from __future__ import annotations

import atexit
import importlib
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from titanlite.parallel.float8 import _quiet_import
from titanlite.runtime import forks

PRELOAD = (
    "torch._dynamo torch._inductor.compile_fx torch.distributed.fsdp tensorboard transformers "
    "titanlite.launch.launcher titanlite.launch.attempts titanlite.launch.node "
    "titanlite.launch.preflight titanlite.launch.terminal titanlite.launch.workers "
    "titanlite.planner.plan titanlite.train.worker"
).split()
EXTRAS = ("torchao.float8", "torch._inductor.codegen.triton")
"""Preloaded too, if they are installed; the first one warns."""
AT_START = ("PYTHON", "LD_", "LC_", "LANG", "OMP_", "MKL_", "KMP_", "MALLOC_", "TORCH_LOGS")
"""The beginnings of the names of variables that are read before `main`."""


def at_start(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a fork cannot change."""
    found = {name: value for name, value in environ.items() if name.startswith(AT_START)}
    found.pop("PYTHONWARNINGS", None)  # of other processes, that report what a loader left
    return found


class Server:
    """A process that is forked, and ends with this one."""

    def __init__(self, environ: Mapping[str, str], requests: socket.socket, pid: int) -> None:
        self.environ = at_start(environ)
        self.requests = requests
        self.pid = pid


def start_server(environ: Mapping[str, str], folder: Path) -> Server:
    """Start an interpreter that imports all of it."""
    forks.adopt_orphans()
    requests, theirs = forks.socket_pair()
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.forked", str(theirs.fileno())],
        env=environ,
        cwd=folder,
        pass_fds=[theirs.fileno()],
        start_new_session=True,
    )
    theirs.close()
    atexit.register(process.kill)
    return Server(environ, requests, process.pid)


class Forked(subprocess.Popen):
    """A process of a server, where subprocess.Popen would start an interpreter (Python 3.10 to
    3.13: the method that it replaces is private)."""

    server: Server

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *rest: Any) -> None:
        _, _, cwd, environ, _, _, _, *pipes = rest[:13]
        ends = pipes[0], pipes[3], pipes[5]  # what the child reads, and where it writes
        files = [own if end == -1 else end for own, end in enumerate(ends)]
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        request = {
            "argv": args,
            "environ": dict(environ),
            "mask": [*map(int, mask)],
            "cwd": str(cwd),
        }
        self.pid = forks.ask(self.server.requests, request, files)
        self._child_created = True
        self._close_pipe_fds(*pipes)


def serve(requests: socket.socket) -> None:
    """Be the process that is forked; in each fork, run the module that was asked for."""
    forks.require_forkable()
    request, files = forks.serve(requests)
    forks.become(request, files)
    module, *arguments = request["argv"]
    sys.argv = ["-m", *arguments]
    sys.path[0] = os.getcwd()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    for name in PRELOAD:
        importlib.import_module(name)
    with _quiet_import():
        for name in EXTRAS:
            with suppress(ImportError):
                importlib.import_module(name)
    serve(socket.socket(fileno=int(sys.argv[1])))
