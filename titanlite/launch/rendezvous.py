"""How the nodes of a job find each other: a roll call that can say who is missing.

Node ranks are the announced ones (torch's dynamic rendezvous orders nodes by host name), so rank 0 is on the node
that was called 0, and a run that can't begin names the nodes that did not come.
"""

from __future__ import annotations

import socket
import time
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from titanlite.errors import UserError
from titanlite.runtime.cluster import Nodes


class NodeRendezvous(RendezvousHandler):
    """One store for the launchers of all nodes, on the node with rank 0, and one answer for the elastic agent."""

    def __init__(self, nodes: Nodes, processes: int, timeout_seconds: int) -> None:
        """Meet the other launchers; UserError if not all come in time, or they disagree."""
        self._nodes, self._rounds = nodes, 0
        deadline = time.monotonic() + timeout_seconds
        self._store = self._open_store(deadline, timeout_seconds)
        if nodes.count > 1:
            self._meet(processes, deadline, timeout_seconds)

    def _open_store(self, deadline: float, timeout_seconds: int) -> dist.TCPStore:
        """Listen on node 0; elsewhere call it again and again, so that Ctrl-C is heard in between."""
        address = self._nodes.master_addr, self._nodes.master_port
        here = self._nodes.rank == 0
        while True:
            try:
                patience = timedelta(seconds=timeout_seconds if here else 2)
                store = dist.TCPStore(*address, is_master=here, wait_for_workers=False, timeout=patience)
                store.set_timeout(timedelta(seconds=timeout_seconds))
                return store
            except (dist.DistError, RuntimeError) as error:
                if here:
                    where = f"{address[0]}:{address[1]}, its MASTER_ADDR and MASTER_PORT"
                    raise UserError(f"node 0 cannot listen at {where}: {error}") from None
                if time.monotonic() > deadline:
                    raise UserError(
                        f"1 of {self._nodes.count} nodes came: node 0 did not answer at {address[0]}:{address[1]} "
                        f"within {timeout_seconds} s (comm.init_timeout_seconds); is it started, is MASTER_ADDR its "
                        "address, is the port open?"
                    ) from None

    def _meet(self, processes: int, deadline: float, timeout_seconds: int) -> None:
        me = self._nodes.rank
        if self._store.add(f"claims/{me}", 1) > 1:
            raise UserError(f"two launchers say that they are node {me}: every node needs a NODE_RANK of its own")
        self._store.set(f"node/{me}", f"{processes} {socket.gethostname()}")
        keys = {rank: f"node/{rank}" for rank in range(self._nodes.count)}
        while missing := [rank for rank, key in keys.items() if not self._present(key)]:
            if time.monotonic() > deadline:
                came = self._nodes.count - len(missing)
                raise UserError(
                    f"{came} of {self._nodes.count} nodes came within {timeout_seconds} s "
                    f"(comm.init_timeout_seconds); missing: NODE_RANK {', '.join(map(str, missing))}"
                )
            time.sleep(0.2)
        others = {rank: int(self._store.get(key).split()[0]) for rank, key in keys.items()}
        if set(others.values()) != {processes}:
            counts = ", ".join(f"node {rank}: {count}" for rank, count in others.items())
            raise UserError(f"the nodes have different numbers of processes ({counts}): set NGPU to the same on all")

    def _present(self, key: str) -> bool:
        try:
            return self._store.check([key])
        except (dist.DistError, RuntimeError):
            raise UserError("node 0 went away before all nodes had come; its console says why") from None

    def wait_for(self, what: str, done_here: bool) -> None:
        """Let all nodes wait until node 0 has done something."""
        if done_here:
            self._store.set(what, "done")
        try:
            self._store.wait([what])
        except (dist.DistError, RuntimeError):
            raise UserError(f"node 0 did not get ready ({what}); its console says why") from None

    # What torch's elastic agent asks for.

    def next_rendezvous(self) -> RendezvousInfo:
        self._rounds += 1
        store = dist.PrefixStore(f"round-{self._rounds}", self._store)
        address = RendezvousStoreInfo(self._nodes.master_addr, self._store.port)
        return RendezvousInfo(store, self._nodes.rank, self._nodes.count, address)

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return "titanlite"

    def get_run_id(self) -> str:
        return "titanlite"

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True
