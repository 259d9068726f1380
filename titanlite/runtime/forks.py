"""Processes that need no imports: forks of this one, as it was when their server was created.

The server is a fork of this process, and ends with it. For each request it forks twice, so that
this process, which adopts orphans, becomes the parent. Only Linux supports that. Imports no torch.
"""

from __future__ import annotations

import ctypes
import gc
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

ADOPT_ORPHANS = 36
"""PR_SET_CHILD_SUBREAPER of Linux."""
MOST_BYTES = 1 << 20
"""Size limit of a request, which holds the environment and the arguments."""
POLL_SECONDS = 0.02
_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
"""The signals that titanlite handles."""

T = TypeVar("T")
Task = Callable[[], None]
"""What a new process runs, with its arguments in sys.argv; the process ends when this returns."""


class CannotFork(Exception):
    """A fork of this process might hang or fail; the message says why."""


def require_forkable() -> None:
    """Raise CannotFork unless a fork of this process would work like a new one. It would lack other
    threads, which may hold locks, and a GPU driver does not survive a fork.
    """
    if sys.platform != "linux":
        raise CannotFork(f"{sys.platform} cannot")
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise CannotFork(f"this process has {threads} threads")
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_initialized():
        raise CannotFork("this process has used a GPU")


class Child:
    """A process forked by a server, with the methods of subprocess.Popen that are needed."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while True:
            code = self.poll()
            if code is not None:
                return code
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(POLL_SECONDS)


class ForkServer:
    """Forks this process, as it is now, at each `start`."""

    def __init__(self, task: Task) -> None:
        require_forkable()
        sys.stdout.flush()  # or forks would print the buffer again
        sys.stderr.flush()
        self.fault = ""
        """Why it can no longer start processes."""
        self._requests, theirs = socket_pair()
        adopt_orphans()
        if not os.fork():
            self._requests.close()
            with suppress(BaseException):
                _serve(theirs, task)
            os._exit(1)
        theirs.close()

    def start(self, argv: Sequence[str], environ: Mapping[str, str], files: Sequence[int]) -> Child:
        """Start a process with these standard files and variables, in a new session; raise
        CannotFork if that fails."""
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        request = {"argv": [*argv], "environ": {**environ}, "mask": [*map(int, mask)]}
        try:
            return Child(ask(self._requests, request, files))
        except CannotFork as error:
            self.fault = str(error)
            raise


def in_a_fork(function: Callable[[], T]) -> T | None:
    """Call a function in a fork and return its result, which JSON can hold, or None if it fails, so
    that what it starts stays out of this process.
    """
    read, write = os.pipe()
    child = os.fork()
    if not child:
        with suppress(BaseException):
            os.write(write, json.dumps(function()).encode())
        os._exit(0)
    os.close(write)
    with open(read, "rb") as file:
        answer = file.read()
    os.waitpid(child, 0)
    return json.loads(answer) if answer else None


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a connection for requests."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MOST_BYTES)
    return ends


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent has ended."""
    ctypes.CDLL(None).prctl(ADOPT_ORPHANS, 1, 0, 0, 0)


def ask(requests: socket.socket, request: Mapping[str, Any], files: Sequence[int]) -> int:
    """Send a request to a server; return the id of the new process."""
    try:
        socket.send_fds(requests, [json.dumps(request).encode()], files)
        answer = requests.recv(MOST_BYTES).decode()
    except OSError as error:
        raise CannotFork(f"no answer from its fork: {error}") from None
    if not answer.isdigit():
        raise CannotFork(answer or "its fork has ended")
    return int(answer)


def _serve(requests: socket.socket, task: Task) -> NoReturn:
    """Fork at each request until the requesting process has ended."""
    request, files = serve(requests)
    code = 1
    try:
        become(request, files)
        task()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def serve(requests: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork at each request; in the new process, return the request and its files."""
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # signals are for the requesting process
    gc.freeze()  # or garbage collection in each fork would copy all pages
    while True:
        message, files, *_ = socket.recv_fds(requests, MOST_BYTES, 3)
        if not message:
            os._exit(0)
        try:
            require_forkable()
            answer = _fork_twice()
        except (CannotFork, OSError) as error:
            answer = str(error)
        if answer is None:
            requests.close()
            _restore(handlers)
            return json.loads(message), files
        for file in files:
            os.close(file)
        requests.send(answer.encode())


def _restore(handlers: Mapping[signal.Signals, Any]) -> None:
    """Handle signals like a new interpreter; ignored ones stay ignored."""
    for number, handler in handlers.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    if handlers[signal.SIGINT] != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _fork_twice() -> str | None:
    """Return the id of a new process that is not a child of this one; None in that process."""
    read, write = os.pipe()
    middle = os.fork()
    if not middle:
        between = os.getpid()
        child = os.fork()
        if child:
            os.write(write, str(child).encode())
            os._exit(0)
        os.close(read)
        os.close(write)
        while os.getppid() == between:  # until it is adopted
            time.sleep(0.0005)
        return None
    os.waitpid(middle, 0)
    os.close(write)
    answer = os.read(read, 64).decode()
    os.close(read)
    return answer


def become(request: Mapping[str, Any], files: Sequence[int]) -> None:
    """Become like a new interpreter: in files, session, variables, signals and random numbers."""
    for number, file in enumerate(files):
        os.dup2(file, number)
    for file in {*files} - {0, 1, 2}:
        os.close(file)
    os.setsid()
    os.environ.clear()
    os.environ.update(request["environ"])
    if "cwd" in request:
        os.chdir(request["cwd"])
    sys.argv = [sys.argv[0], *request["argv"]]
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = _stream(1, sys.stdout)
    sys.stderr = _stream(2, sys.stderr)
    numpy = sys.modules.get("numpy")
    if numpy:
        numpy.random.seed()  # Python's own generator reseeds itself in a fork
    signal.pthread_sigmask(signal.SIG_SETMASK, request["mask"])


def _stream(number: int, before: Any) -> io.TextIOWrapper:
    """Return a text stream like those that an interpreter opens at its start."""
    at_once = bool(os.environ.get("PYTHONUNBUFFERED"))
    buffering = 0 if at_once else -1
    raw = open(number, "wb", buffering, closefd=False)  # noqa: SIM115
    by_line = os.isatty(number) or number == 2
    return io.TextIOWrapper(
        raw, before.encoding, before.errors, line_buffering=by_line, write_through=at_once
    )
