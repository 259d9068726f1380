"""A pool of gloo processes on this machine, for proofs: plain functions run on as many ranks as asked.

The processes come from a fork server that has torch loaded (a fork of a process that ran a backward pass would
hang), live through many runs, and share their process groups with the runs after them for as long as these are on as
many ranks. A rank that dies or is late is named with what it was doing, and the pool is made anew.
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
from torch.distributed import device_mesh
from torch.distributed.distributed_c10d import _world
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from titanlite.runtime.distributed import set_collective_timeout

GRACE_SECONDS = 5.0
"""How long the other ranks may take once one has failed."""
MAX_GROUP_REBUILDS = 32
"""How often a rank gets new groups before it is replaced: torch's caches keep groups that are gone, whose threads
poll, and hundreds of them take half of a small machine. A new rank costs about as much as a run."""


class RankFailed(Exception):
    """A function failed on a rank of the pool; the message names the rank and has its traceback or stack."""


class Pool:
    """Ranks 0 to size - 1. `run` calls a function on some of them; `close` ends them."""

    def __init__(self, size: int, preload: Sequence[str] = ()) -> None:
        self.size = size
        self._preload = ["titanlite.verify.pool", "torch.distributed.fsdp", *preload]
        self._made = 0
        """How often new groups were made; the number is their name."""
        self._made_for = 0
        """Of how many ranks they are; none that another run could use after a failure."""
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
        if self._made_for != world:
            if self._made % MAX_GROUP_REBUILDS == 0:
                self.close()
            self._made, self._made_for = self._made + 1, world
        if not self._processes:
            self._start()
        work = pickle.dumps((function, args))
        for rank in range(world):
            self._connections[rank].send((self._made, rank, world, timeout, work))
        answers, failure = self._collect(world, timeout)
        if failure:
            self._made_for = 0
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
    groups = 0
    with open(stack_file, "w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack)
        while True:
            try:
                number, rank, world, timeout, work = connection.recv()
            except EOFError:
                os._exit(0)
            error, answer = "", b""
            try:
                if number != groups:
                    _make_groups(number, rank, world, port, timeout)
                    groups = number
                set_collective_timeout(timeout, _world.pg_map)  # a run may have left another
                function, args = pickle.loads(work)
                answer = pickle.dumps(function(*args))
            except BaseException:
                error = traceback.format_exc()
            connection.send((error, answer))


def _make_groups(number: int, rank: int, world: int, port: int, timeout: float) -> None:
    """A group of all ranks, and one for all meshes that want the same: making them, and what DTensor works out for a
    mesh, takes longer than a small run."""
    if dist.is_initialized():
        dist.destroy_process_group()
    limit = timedelta(seconds=timeout)
    store = dist.PrefixStore(f"groups-{number}", dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    # DTensor remembers how operations are split, with the mesh of an earlier run, whose groups are gone (private in
    # torch 2.11 to 2.13, tried on both).
    _clear_sharding_prop_cache()
    # Where a mesh finds what it makes its groups with (torch 2.11 to 2.13, tried on both): equal meshes of two runs
    # get the same.
    made: dict[tuple[tuple[int, ...], str], Any] = {}

    def group_of(ranks: list[int], group_desc: str, **more: Any) -> Any:
        key = (tuple(ranks), group_desc)
        if key not in made:
            made[key] = dist.new_group(ranks, group_desc=group_desc, **more)
        return made[key]

    def groups_of(ranks_per_subgroup_list: list[list[int]], group_desc: str) -> tuple[Any, list[Any]]:
        groups = [group_of(ranks, group_desc) for ranks in ranks_per_subgroup_list]
        return next(group for group in groups if rank in dist.get_process_group_ranks(group)), groups

    vars(device_mesh)["new_group"] = group_of
    vars(dist)["new_subgroups_by_enumeration"] = groups_of
