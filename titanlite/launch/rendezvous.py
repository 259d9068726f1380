"""How the nodes of a job meet, before every attempt, and agree on how it ended; errors name the missing nodes.

Node ranks are those of NODE_RANK (torch's dynamic rendezvous orders nodes by host name): rank 0 is always on node 0,
whose launcher has the store where all meet and decides. A node may be lost and come back, but not node 0.
"""

from __future__ import annotations

import json
import socket
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist

from titanlite.config.schema import Fault
from titanlite.errors import FAILED, REFUSED, STOPPED, RunFailed, UserError
from titanlite.fault.beat import Beat, beat_key
from titanlite.launch.failure import Failure
from titanlite.launch.nodes import Nodes
from titanlite.launch.presence import SILENCE_SECONDS, Link, Presence
from titanlite.runtime.distributed import attempt_store

GATHER_SECONDS = 5.0
"""From the first failure that node 0 hears of to its verdict: the others' may be earlier."""
LEAVE_SECONDS = 30.0
"""In which all launchers hear of the end of the run, unless they do not answer."""
TAKEOVER_SECONDS = 3.0
"""Without a sign of life of a launcher, after which another one may take its place."""


class PeerFailed(RunFailed):
    """Another node's part of the attempt has failed, so that this node's cannot go on."""


class Replaced(RunFailed):
    """Another launcher is this node now."""


class RunEnded(RunFailed):
    """There is no next attempt; the code is the exit code."""

    def __init__(self, why: str, code: int) -> None:
        super().__init__(why)
        self.code = code


@dataclass(frozen=True)
class Verdict:
    """How an attempt ended: with an exit code, or to be followed by another attempt (None)."""

    code: int | None
    why: str = ""
    """A line for the terminal."""
    failure: str = ""
    """What failed first, rendered; nothing if all is done."""
    resumes: bool = False
    """The next attempt starts from a checkpoint of this run, whatever the first was told to start from."""


class NodeRendezvous:
    """One store for the launchers of all nodes, on node 0, which the workers use too."""

    def __init__(self, nodes: Nodes, processes: int, fault: Fault, timeout_seconds: int) -> None:
        """Connect to node 0; RunFailed if it is missing, UserError if two launchers say that they are this node."""
        self.rank = nodes.rank
        self._nodes, self._timeout = nodes, timedelta(seconds=timeout_seconds)
        self.on_poll: list[Callable[[], None]] = [self._look_around] if nodes.count > 1 else []
        """The calls of `poll`."""
        self._processes, self._fault = processes, fault
        self._deadline = time.monotonic() + timeout_seconds
        self._within = f"within {timeout_seconds} s (comm.init_timeout_seconds)"
        self.launchers = self._open_store()
        """The store, over a connection that may block: for what is done while node 0 is known to answer."""
        if self.rank == 0:
            self.launchers.set("run", uuid.uuid4().hex)
        run, port = self.launchers.get("run").decode(), self.launchers.port
        self._link = Link(nodes.master_addr, port, run, self.launchers)
        self._presence = Presence(Link(nodes.master_addr, port, run), self.rank, nodes.count, self._claim())
        self._members: list[int] = []
        self.attempt = 1
        """The number of the attempt that runs, or comes next."""
        self._presence.start()

    def _open_store(self) -> dist.TCPStore:
        """Listen on node 0; on other nodes retry in short attempts, so that Ctrl-C is noticed between them."""
        host, port, is_node_0 = self._nodes.master_addr, self._nodes.master_port, self.rank == 0
        attempt = self._timeout if is_node_0 else timedelta(seconds=2)
        while True:
            try:
                store = dist.TCPStore(host, port, is_master=is_node_0, wait_for_workers=False, timeout=attempt)
                store.set_timeout(self._timeout)
                return store
            except (dist.DistError, RuntimeError) as error:
                if is_node_0:
                    listening = f"listen at {host}:{port}, its MASTER_ADDR and MASTER_PORT"
                    raise RunFailed(f"node 0 cannot {listening}: {error}") from None
                if time.monotonic() > self._deadline:
                    remedy = "that it is started, that MASTER_ADDR is its address, and that the port is open"
                    message = f"node 0 did not answer at {host}:{port} {self._within}: check {remedy}"
                    raise RunFailed(message) from None

    @property
    def address(self) -> tuple[str, int]:
        """Return host and port of the store."""
        return self._nodes.master_addr, self.launchers.port

    def _claim(self) -> int:
        """Return how many launchers have been this node; refuse to be the second one that lives."""
        key, claims = f"launcher/{self.rank}", self.launchers.add(f"claims/{self.rank}", 1)
        if claims > 1:
            before, deadline = self._peek(key), time.monotonic() + TAKEOVER_SECONDS
            while time.monotonic() < deadline:
                if self._peek(key) != before:
                    raise UserError(f"two launchers use NODE_RANK={self.rank}; every node needs its own")
                time.sleep(0.2)
        self.launchers.set(key, f"{claims} 0")
        return claims

    def _peek(self, key: str) -> bytes | None:
        return self.launchers.get(key) if self.launchers.check([key]) else None

    def connect_again(self) -> dist.TCPStore:
        """Return another connection to the launchers' store, for a thread: a wait in one blocks all who use it."""
        return dist.TCPStore(*self.address, is_master=False, timeout=self._timeout)

    def wait_for_node_0(self, what: str) -> None:
        """Wait on all nodes until node 0 calls this too, when it has prepared `what`."""
        if self.rank == 0:
            self.launchers.set(what, "done")
        try:
            self.launchers.wait([what])
        except (dist.DistError, RuntimeError):
            raise RunFailed(f"node 0 did not prepare {what}; see that node's log") from None

    # ---------------------------------------------------------------- before an attempt

    def call_roll(self, fits: Callable[[int], str]) -> list[int]:
        """Return the nodes that take part in the next attempt, of which this is one; RunEnded if there is none.

        All take part in the first one; later those that are there in time, if they are `fault.min_nodes`. `fits` says
        why a number of ranks does not fit the job, or nothing.
        """
        if self.rank == 0:
            self._write("attempt", str(self.attempt))
        else:
            self._find_attempt()
        self._write(f"call/{self.attempt}/{self.rank}", str(self._processes))
        if self.rank == 0:
            self._write(f"members/{self.attempt}", json.dumps(self._choose(fits)))
        ends = f"verdict/{self.attempt - 1}", f"verdict/{self.attempt}"
        members = json.loads(self._wait(f"members/{self.attempt}", *ends))
        if "why" in members:
            self._leave()
            raise RunEnded(members["why"], members["code"])
        self._presence.attempt, self._members = self.attempt, members["nodes"]
        return self._members

    def _find_attempt(self) -> None:
        """Join the attempt that is being prepared: a launcher that was started again finds one under way."""
        self.attempt = max(self.attempt, int(self._wait("attempt")))
        members = self._read(f"members/{self.attempt}")
        if members is None:
            return
        ended = f"ended/{self.attempt}/{self.rank}"
        if self.rank in json.loads(members).get("nodes", []) and self._read(ended) is None:
            replaced = self._lost(f"the launcher of NODE_RANK={self.rank} ended, and another has taken its place")
            self._write(ended, replaced.render())
            self._write(f"failed/{self.attempt}", "")  # a peer over NCCL may not notice
        self.attempt += 1

    def _choose(self, fits: Callable[[int], str]) -> dict[str, object]:
        count, first = self._nodes.count, self.attempt == 1
        window = self._fault.rejoin_seconds
        deadline = self._deadline if first else time.monotonic() + window
        within = self._within if first else f"within {window} s (fault.rejoin_seconds)"
        while True:
            called = {node: self._read(f"call/{self.attempt}/{node}") for node in range(count)}
            silent = {node for node, seconds in self._presence.silent.items() if seconds > SILENCE_SECONDS}
            here = {node: int(value) for node, value in called.items() if value and node not in silent}
            if len(here) == count or time.monotonic() > deadline:
                break
            time.sleep(0.2)
        missing = ", ".join(str(node) for node in range(count) if node not in here)
        if len(set(here.values())) > 1:
            listed = ", ".join(f"node {node}: {processes}" for node, processes in here.items())
            why = f"the nodes have different numbers of processes ({listed}): set NGPU to the same on all"
            return {"why": why, "code": REFUSED}
        if len(here) < ((not first and self._fault.min_nodes) or count):
            why = f"only {len(here)} of {count} nodes connected {within}; missing: NODE_RANK {missing}"
            return {"why": why, "code": FAILED}
        if missing and (why := fits(len(here) * self._processes)):
            return {"why": f"without NODE_RANK {missing}: {why}", "code": FAILED}
        return {"nodes": [*here]}

    # ---------------------------------------------------------------- while workers run

    def poll(self) -> None:
        """Do what is due while workers run; an error ends them."""
        for call in self.on_poll:
            call()

    def _look_around(self) -> None:
        """End this node's workers when the attempt is over elsewhere."""
        presence = self._presence
        self._check_not_replaced()
        if presence.failed_attempt == self.attempt:
            raise PeerFailed("another node has failed")
        if max(presence.lost_seconds, *(presence.silent.get(node, 0.0) for node in self._members)) > SILENCE_SECONDS:
            raise PeerFailed(f"a node has not answered for {SILENCE_SECONDS:.0f} s")

    def _check_not_replaced(self) -> None:
        if self._presence.is_replaced:
            raise Replaced(f"another launcher has taken over NODE_RANK={self.rank}: this one had seemed dead")

    def is_over(self, attempt: int) -> bool:
        """Whether an attempt has failed on some node, or all nodes have settled how it ended."""
        return self.attempt > attempt or self._presence.failed_attempt == attempt

    def exchange_stop(self, reason: str) -> str:
        """Tell the other launchers and the ranks why to stop, if at all; return their reason, if there is one."""
        self._presence.stop = self._presence.stop or reason
        return self._presence.stop

    def beats(self, attempt: int, ranks: Iterable[int]) -> dict[int, Beat]:
        """Return the last beats of these ranks; on node 0, which has them."""
        store = attempt_store(self.launchers, str(attempt))
        keys = {rank: beat_key(rank) for rank in ranks}
        return {rank: Beat.parse(store.get(key)) for rank, key in keys.items() if store.check([key])}

    # ---------------------------------------------------------------- after an attempt

    def settle(self, own: Failure | None, over: bool, decide: Callable[[list[Failure]], Verdict]) -> Verdict:
        """Tell the others how the attempt ended here and return what follows; node 0 has `decide` do so.

        `over` says that the attempt has ended for all, whether this node has a failure of its own or not.
        """
        number = self.attempt
        self._write(f"ended/{number}/{self.rank}", own.render() if own else "")
        if over or own:
            self._write(f"failed/{number}", "")
        if self.rank == 0:
            verdict = decide(self._gather())
            self._write(f"verdict/{number}", json.dumps(asdict(verdict)))
        else:
            verdict = Verdict(**json.loads(self._wait(f"verdict/{number}")))
        if verdict.code is None:
            self.attempt = number + 1
        else:
            self._leave()
        return verdict

    def _gather(self) -> list[Failure]:
        """Return the failures of all nodes, and of those that do not answer; none if all nodes are done."""
        ended: dict[int, bytes] = {}
        failed_at, silent = 0.0, self._presence.silent
        while missing := [node for node in self._members if node not in ended]:
            found = {node: self._read(f"ended/{self.attempt}/{node}") for node in missing}
            ended |= {node: text for node, text in found.items() if text is not None}
            now, lost = time.monotonic(), any(silent.get(node, 0.0) > SILENCE_SECONDS for node in missing)
            if not failed_at and (lost or self._read(f"failed/{self.attempt}") is not None):
                failed_at = now
            if failed_at and now > failed_at + GATHER_SECONDS:
                break
            time.sleep(0.1)
        failures = [Failure.parse(text) for text in ended.values() if text]
        for node in self._members:
            if node not in ended and silent.get(node, 0.0) > TAKEOVER_SECONDS:
                failures.append(self._lost(f"the launcher of NODE_RANK={node} does not answer", silent[node]))
        return failures or [self._lost("the launchers lost contact with each other")] * bool(failed_at)

    def _lost(self, words: str, seconds: float = 0.0) -> Failure:
        return Failure(-1, socket.gethostname(), time.time() - seconds, None, words, words, known=False)

    def leave(self, failure: Failure) -> None:
        """Tell the others that this launcher ends, and why, as far as they can be told in a few seconds."""
        with suppress(RunFailed):
            self._write(f"ended/{self.attempt}/{self.rank}", failure.render(), 0)
            if failure.code != STOPPED or not self._presence.stop:  # all nodes asked leave after the same step
                self._write(f"failed/{self.attempt}", "", 0)
            if self.rank == 0:
                verdict = Verdict(failure.code, f"node 0: {failure.words}")
                self._write(f"verdict/{self.attempt}", json.dumps(asdict(verdict)), 0)
            self._leave()

    def _leave(self) -> None:
        """Say that this launcher has read the verdict; on node 0 wait for the others, whose store ends with it."""
        self._write(f"left/{self.rank}", "")
        deadline = time.monotonic() + LEAVE_SECONDS
        while self.rank == 0 and time.monotonic() < deadline:
            silent = self._presence.silent
            others = [node for node in range(1, self._nodes.count) if silent.get(node, 0.0) < TAKEOVER_SECONDS]
            if all(self._read(f"left/{node}") is not None or not self._read(f"launcher/{node}") for node in others):
                break
            time.sleep(0.1)
        self._presence.end()

    # ---------------------------------------------------------------- the store

    def _read(self, key: str) -> bytes | None:
        self._check_not_replaced()
        return self._link.read(key, self._fault.rejoin_seconds)

    def _write(self, key: str, value: str, seconds: float | None = None) -> None:
        self._check_not_replaced()
        self._link.write(key, value, self._fault.rejoin_seconds if seconds is None else seconds)

    def _wait(self, key: str, *unless: str) -> bytes:
        """Return the value of a key when there is one; RunEnded if others have a verdict that ends the run."""
        while (value := self._read(key)) is None:
            for verdict in (Verdict(**json.loads(text)) for other in unless if (text := self._read(other))):
                if verdict.code is not None:
                    self._leave()
                    raise RunEnded(f"the run has ended: {verdict.why or 'see node 0'}", verdict.code)
            time.sleep(0.1)
        return value
