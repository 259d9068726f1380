"""A pool of gloo processes on this machine, for proofs: plain functions run on as many ranks as asked.

The processes come from a fork server that has torch loaded (a fork of a process that ran a backward pass would
hang), live through many runs, and get a new process group for each. A rank that dies or is late is named with what
it was doing, and the pool is made anew.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

GRACE_SECONDS = 5.0
"""How long the other ranks may take once one has failed."""
RUNS_OF_A_RANK = 32
"""A rank is then replaced: torch's caches keep the process groups of earlier runs, whose threads poll, and those of
hundreds of runs take half of a small machine. A new rank costs about as much as a run."""


class RankFailed(Exception):
    """A function failed on a rank of the pool; the message names the rank and has its traceback or stack."""


class Pool:
    """Ranks 0 to size - 1. `run` calls a function on some of them; `close` ends them."""

    def __init__(self, size: int, preload: Sequence[str] = ()) -> None:
        self.size = size
        self._preload = ["titanlite.runtime.pool", "torch.distributed.fsdp", *preload]
        self._runs = 0
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []

    def run(
        self, function: Callable[..., Any], *args: Any, world: int | None = None, timeout: float = 60
    ) -> list[Any]:
        """Results by rank of `function(*args)` on `world` ranks, with a gloo group of that size in place.

        The function must be importable by name, and its results picklable.
        """
        world = world or self.size
        assert world <= self.size, f"the pool has {self.size} ranks, not {world}"
        if self._runs % RUNS_OF_A_RANK == 0:
            self.close()
        if not self._processes:
            self._start()
        self._runs += 1
        work = pickle.dumps((function, args))
        for rank in range(world):
            self._connections[rank].send((self._runs, rank, world, timeout, work))
        answers, failure = self._collect(world, timeout)
        if failure:
            if len(answers) < world:
                self.close()
            raise RankFailed(failure)
        return [pickle.loads(answers[rank]) for rank in range(world)]

    def _collect(self, world: int, timeout: float) -> tuple[dict[int, bytes], str]:
        """Answers by rank, and what went wrong first."""
        rank_of = {id(connection): rank for rank, connection in enumerate(self._connections[:world])}
        answers: dict[int, bytes] = {}
        failure = ""
        deadline = time.monotonic() + timeout
        while len(answers) < world:
            pending = [c for c in self._connections[:world] if rank_of[id(c)] not in answers]
            ready = wait(pending, max(0.0, deadline - time.monotonic()))
            if not ready:
                late = [rank_of[id(c)] for c in pending]
                return answers, failure or self._describe_late(late, timeout)
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = rank_of[id(connection)]
                try:
                    error, answers[rank] = connection.recv()
                except EOFError:
                    self._processes[rank].join()
                    return answers, failure or f"rank {rank} died (exit code {self._processes[rank].exitcode})"
                if error and not failure:
                    failure = f"rank {rank} of {world} raised:\n{error}"
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return answers, failure

    def _describe_late(self, ranks: list[int], timeout: float) -> str:
        """What late ranks are doing; each writes its stack when told by a signal."""
        for rank in ranks:
            os.kill(self._processes[rank].pid or 0, signal.SIGUSR1)
        time.sleep(0.3)
        stacks = [f"rank {rank}:\n{self._stack_file(rank).read_text()}" for rank in ranks]
        return f"no answer within {timeout:g} s from rank {', '.join(map(str, ranks))}\n" + "\n".join(stacks)

    def _stack_file(self, rank: int) -> Path:
        return Path(self._folder.name) / f"stack-{rank}"

    def _start(self) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload(self._preload)
        self._folder = tempfile.TemporaryDirectory(prefix="titanlite-pool-")
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            arguments = (theirs, self._store.port, str(self._stack_file(rank)), list(sys.path))
            process = context.Process(target=_serve, args=arguments, daemon=True, name=f"rank {rank}")
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def close(self) -> None:
        """Kill all ranks; the next run starts new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []


def _serve(connection: Connection, port: int, stack_file: str, path: list[str]) -> None:
    """A rank's life: run what is sent, answer, until the other side is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent ends its ranks
    sys.path[:] = path
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    with open(stack_file, "w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack)
        while True:
            try:
                number, rank, world, timeout, work = connection.recv()
            except EOFError:
                os._exit(0)
            error, answer = "", b""
            try:
                answer = _run(number, rank, world, port, timeout, work)
            except BaseException:
                error = traceback.format_exc()
            connection.send((error, answer))


def _run(number: int, rank: int, world: int, port: int, timeout: float, work: bytes) -> bytes:
    limit = timedelta(seconds=timeout)
    store = dist.PrefixStore(f"run-{number}", dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    # DTensor remembers how operations are split, with the mesh of an earlier run, whose groups are gone (private in
    # torch 2.11 to 2.13, tried on both).
    _clear_sharding_prop_cache()
    try:
        function, args = pickle.loads(work)
        return pickle.dumps(function(*args))
    finally:
        dist.destroy_process_group()
