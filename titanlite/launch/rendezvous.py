"""How the nodes of a job find each other, with errors that name the missing nodes.

Node ranks are those of NODE_RANK (torch's dynamic rendezvous orders nodes by host name): rank 0 is always on node 0.
"""

import socket
import time
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from titanlite.errors import RunFailed, UserError
from titanlite.launch.nodes import Nodes


class NodeRendezvous(StaticTCPRendezvous):
    """One store for the launchers of all nodes, on node 0, which torch's elastic agent and the workers use too."""

    def __init__(self, nodes: Nodes, processes: int, timeout_seconds: int) -> None:
        """Connect to the other launchers; RunFailed if a node is missing, UserError if two nodes contradict."""
        super().__init__(nodes.master_addr, nodes.master_port, nodes.rank, nodes.count, "titanlite", timeout_seconds)
        self._rounds, self._deadline = 0, time.monotonic() + timeout_seconds
        self._within = f"within {timeout_seconds} s (comm.init_timeout_seconds)"
        self._launchers = self._open_store()
        if nodes.count > 1:
            self._wait_for_all_nodes(processes)

    def _open_store(self) -> dist.TCPStore:
        """Listen on node 0; on other nodes retry in short attempts, so that Ctrl-C is noticed between them."""
        host, port, is_node_0 = self.master_addr, self.master_port, self.rank == 0
        attempt = self.timeout if is_node_0 else timedelta(seconds=2)
        while True:
            try:
                store = dist.TCPStore(host, port, is_master=is_node_0, wait_for_workers=False, timeout=attempt)
                store.set_timeout(self.timeout)
                return store
            except (dist.DistError, RuntimeError) as error:
                if is_node_0:
                    listening = f"listen at {host}:{port}, its MASTER_ADDR and MASTER_PORT"
                    raise RunFailed(f"node 0 cannot {listening}: {error}") from None
                if time.monotonic() > self._deadline:
                    remedy = "that it is started, that MASTER_ADDR is its address, and that the port is open"
                    message = f"node 0 did not answer at {host}:{port} {self._within}: check {remedy}"
                    raise RunFailed(message) from None

    def _wait_for_all_nodes(self, processes: int) -> None:
        rank = self.rank
        if self._launchers.add(f"claims/{rank}", 1) > 1:
            raise UserError(f"two launchers use NODE_RANK={rank}; every node needs its own")
        self._launchers.set(f"node/{rank}", f"{processes} {socket.gethostname()}")
        keys = {node: f"node/{node}" for node in range(self.world_size)}
        while missing := [node for node, key in keys.items() if not self._has(key)]:
            if time.monotonic() > self._deadline:
                connected = f"{self.world_size - len(missing)} of {self.world_size} nodes connected {self._within}"
                raise RunFailed(f"only {connected}; missing: NODE_RANK {', '.join(map(str, missing))}")
            time.sleep(0.2)
        counts = {node: int(self._launchers.get(key).split()[0]) for node, key in keys.items()}
        if set(counts.values()) != {processes}:
            listed = ", ".join(f"node {node}: {count}" for node, count in counts.items())
            raise UserError(f"the nodes have different numbers of processes ({listed}): set NGPU to the same on all")

    def _has(self, key: str) -> bool:
        try:
            return self._launchers.check([key])
        except (dist.DistError, RuntimeError):
            raise RunFailed("node 0 exited before all nodes connected; see that node's log") from None

    def wait_for_node_0(self, what: str) -> None:
        """Wait on all nodes until node 0 calls this too, when it has prepared `what`."""
        if self.rank == 0:
            self._launchers.set(what, "done")
        try:
            self._launchers.wait([what])
        except (dist.DistError, RuntimeError):
            raise RunFailed(f"node 0 did not prepare {what}; see that node's log") from None

    def next_rendezvous(self) -> RendezvousInfo:
        """Give the elastic agent the store under a new prefix, as for every later attempt."""
        self._rounds += 1
        store = dist.PrefixStore(f"round-{self._rounds}", self._launchers)
        address = RendezvousStoreInfo(self.master_addr, self._launchers.port)
        return RendezvousInfo(store, self.rank, self.world_size, address)

    def get_backend(self) -> str:
        return "titanlite"
