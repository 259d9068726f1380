"""A pool of processes on this machine that run plain functions as ranks.

The processes come from a fork server that has loaded torch (a fork of a process that ran a backward
pass would hang) and survive many runs; consecutive runs on the same number of ranks share their
process groups. If a rank dies or is late, the error names it with its stack, and the pool starts
new processes."""

import faulthandler
import gc
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import forkserver, get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.forkserver import ForkServer
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh

from titanlite.planner.torch_private import forget_meshes, replaced
from titanlite.runtime import torch_private
from titanlite.runtime.distributed import set_collective_timeout, shared_device
from titanlite.train.trainer import Trainer

GRACE_SECONDS = 5.0
"""Time for the other ranks to finish after one has failed."""
MAX_GROUP_REBUILDS = 32
"""How often a process gets new groups before it is replaced: torch's caches keep destroyed groups,
whose threads poll; hundreds of them use half of a small machine. A new process costs about as much
as a run."""

_PRELOAD = ("titanlite.verify.pool", "torch.distributed.fsdp")
_GPUS = "CUDA_VISIBLE_DEVICES"
_FORK_SERVERS: dict[frozenset[str], ForkServer] = {}


class RankFailed(Exception):
    """A function failed on a rank of the pool; the message has the rank and its traceback or
    stack.
    """


class Pool:
    """Ranks 0 to size - 1. `run` calls a function on some of them; `close` ends them."""

    def __init__(
        self, size: int, preload: Sequence[str] = (), log: str = "", device: str = ""
    ) -> None:
        self.size = size
        self.device = device
        self.log = log
        """The file for the ranks' stderr, or an empty string."""
        self._preload = preload
        self._generation = 0
        """How often new groups were created; part of their name."""
        self._world = 0
        """The size of the current groups; 0 after a failure, which makes them unusable."""
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []

    def run(
        self, function: Callable[..., Any], *args: Any, world: int = 0, timeout: float = 60
    ) -> list[Any]:
        """Return the results by rank of `function(*args)` on `world` ranks (default: all), which
        form a gloo group.

        The function must be importable by name, return picklable results, and be done within
        `timeout` seconds."""
        world = world or self.size
        assert world <= self.size, f"the pool has {self.size} ranks, not {world}"
        if self._world != world:
            # Until torch 2.14 is the minimum: 2.11 crashes if a process splits its second group of
            # all ranks on GPUs (pytorch#192109).
            if self.device == "cuda" or self._generation % MAX_GROUP_REBUILDS == 0:
                self.close()
            self._generation += 1
            self._world = world
        if not self._processes:
            self._start()
        work = pickle.dumps((function, args))
        for rank in range(world):
            self._connections[rank].send((self._generation, rank, world, timeout, work))
        answers, failure = self._collect(world, timeout)
        if failure:
            self._world = 0
            if len(answers) < world:
                self.close()
            raise RankFailed(failure)
        return [pickle.loads(answers[rank]) for rank in range(world)]

    def _collect(self, world: int, timeout: float) -> tuple[dict[int, bytes], str]:
        """Return the answers by rank, and the first failure or an empty string; a death takes
        precedence over what other ranks saw.
        """
        answers: dict[int, bytes] = {}
        pending = {self._connections[rank]: rank for rank in range(world)}
        failure = ""
        deadline = time.monotonic() + timeout
        while pending:
            ready: list[Any] = wait(pending, max(0.0, deadline - time.monotonic()))
            if not ready:
                return answers, failure or self._describe_late([*pending.values()], timeout)
            for connection in sorted(ready, key=pending.__getitem__):
                rank = pending.pop(connection)
                try:
                    error, answers[rank] = connection.recv()
                except EOFError:
                    self._processes[rank].join()
                    stack = self._stack(rank)  # there is one if faulthandler caught the signal
                    died = f"rank {rank} died, exit code {self._processes[rank].exitcode}"
                    return answers, "\n".join(filter(None, (died, failure, stack)))
                if error and not failure:
                    failure = f"rank {rank} of {world} raised:\n{error}"
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return answers, failure

    def _describe_late(self, ranks: list[int], timeout: float) -> str:
        """Return the stacks of late ranks; each writes its stack on a signal."""
        started = [rank for rank in ranks if self._stack_file(rank).exists()]
        for rank in started:  # the signal would kill the others
            pid = self._processes[rank].pid
            assert pid
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        if started:
            time.sleep(0.3)
        stacks = []
        for rank in ranks:
            stack = f"rank {rank} has not started: its process does not wait for work yet"
            if rank in started:
                stack = f"rank {rank}:\n{self._stack(rank)}"
            stacks.append(stack)
        return (
            f"no answer within {timeout:g} s from rank {', '.join(map(str, ranks))}\n"
            + "\n".join(stacks)
        )

    def _stack_file(self, rank: int) -> Path:
        """Return the file of a rank's stack; once it exists, the rank writes there on a signal."""
        return Path(self._folder.name) / f"stack-{rank}"

    def _stack(self, rank: int) -> str:
        file = self._stack_file(rank)
        if not file.exists():
            return ""
        return file.read_text()

    def _start(self) -> None:
        method = "forkserver"
        if self.device == "cuda":
            # Once a preloaded module has asked the driver for devices, a fork can't use it.
            method = "spawn"
        context: Any = get_context(method)
        self._folder = tempfile.TemporaryDirectory(prefix="titanlite-pool-")
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.size):
            connection, rank_connection = context.Pipe()
            arguments = (
                rank_connection,
                self._store.port,
                str(self._stack_file(rank)),
                list(sys.path),
                self.log,
                self.device,
            )
            process = context.Process(
                target=_serve, args=arguments, daemon=True, name=f"rank {rank}"
            )
            if self.device == "cuda":
                process.start()
            else:
                with _forking(fork_server(self._preload)):
                    process.start()
            rank_connection.close()
            self._processes.append(process)
            self._connections.append(connection)

    def close(self) -> None:
        """Kill all ranks; the next run starts new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes = []
        self._connections = []


def fork_server(preload: Sequence[str]) -> ForkServer:
    """Return a running or new fork server with at least these modules, for pools only.

    multiprocessing has only one per process, with the modules of whoever started it first.
    """
    needed = (*_PRELOAD, *preload)
    for modules, server in _FORK_SERVERS.items():
        if modules.issuperset(needed):
            return server
    server = _FORK_SERVERS[frozenset(needed)] = ForkServer()
    server.set_forkserver_preload([*needed])
    return server


@contextmanager
def _forking(server: ForkServer) -> Iterator[None]:
    """Let multiprocessing start processes by this fork server, which sees no GPUs: compiling asks
    for all that it sees, and fails in a fork.
    """
    shown = os.environ.get(_GPUS)
    os.environ[_GPUS] = ""
    try:
        with replaced(forkserver, "connect_to_new_process", server.connect_to_new_process):
            yield
    finally:
        del os.environ[_GPUS]
        if shown is not None:
            os.environ[_GPUS] = shown


def _serve(
    connection: Connection, port: int, stack_file: str, path: list[str], log: str, device: str
) -> None:
    """Run each function received and send the answer, until the pool's process ends."""
    # Ctrl-C reaches every process; the parent kills its ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.path[:] = path
    if log:
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), 2)
    torch.set_num_threads(1)
    Trainer.thaws = False
    loopback = "lo"
    if sys.platform == "darwin":
        loopback = "lo0"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    current_generation = 0
    with open(f"{stack_file}.new", "w") as stack:
        faulthandler.enable(file=stack)
        faulthandler.register(signal.SIGUSR1, file=stack)
        os.rename(stack.name, stack_file)
        while True:
            try:
                generation, rank, world, timeout, work = connection.recv()
            except EOFError:
                os._exit(0)
            error = ""
            answer = b""
            try:
                if generation != current_generation:
                    _make_groups(generation, rank, world, port, timeout, device)
                    current_generation = generation
                set_collective_timeout(timeout)  # an earlier run may have changed it
                function, args = pickle.loads(work)
                gc.freeze()  # otherwise each collection would scan everything imported
                answer = pickle.dumps(function(*args))
            except BaseException:
                error = traceback.format_exc()
            connection.send((error, answer))


def _make_groups(
    generation: int, rank: int, world: int, port: int, timeout: float, device: str
) -> None:
    """Create the group of all ranks, and let equal meshes share their groups from now on.

    Creating groups, and what DTensor computes for a mesh, takes longer than a small run.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    limit = timedelta(seconds=timeout)
    store = dist.PrefixStore(
        f"groups-{generation}", dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    )
    torch_private.give_gloo_groups_one_thread()
    backend = "gloo"
    gpu = None
    if device == "cuda":
        backend = "cuda:nccl,cpu:gloo"
        gpu = shared_device(rank, world)
        torch.cuda.set_device(gpu)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world, timeout=limit, device_id=gpu
    )
    forget_meshes()  # it refers to earlier runs' meshes, whose groups are destroyed
    # A mesh creates its groups with these functions (torch 2.11, 2.13, 2.15).
    groups: dict[tuple[tuple[int, ...], str], Any] = {}

    def group_of(ranks: list[int], group_desc: str, **more: Any) -> Any:
        key = (tuple(ranks), group_desc)
        if key not in groups:
            groups[key] = dist.new_group(ranks, group_desc=group_desc, **more)
        return groups[key]

    def groups_of(
        ranks_per_subgroup_list: list[list[int]], group_desc: str
    ) -> tuple[Any, list[Any]]:
        subgroups = [group_of(ranks, group_desc) for ranks in ranks_per_subgroup_list]
        own = (group for group in subgroups if rank in dist.get_process_group_ranks(group))
        return next(own, None), subgroups

    vars(device_mesh)["new_group"] = group_of
    vars(dist)["new_subgroups_by_enumeration"] = groups_of
