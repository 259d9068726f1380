"""This launcher's part among the nodes: meet the others, run an attempt, agree on how it ended, and
leave.

Nodes have the ranks given by NODE_RANK (torch's dynamic rendezvous would order them by host name),
so rank 0 is always on node 0. Node 0's launcher hosts the store where all meet, and decides. Any
node but node 0 may be lost and come back."""

from __future__ import annotations

import atexit
import json
import os
import socket
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from titanlite.config.schema import JobConfig
from titanlite.errors import CUT_SHORT, FAILED, RunFailed, UserError, first_line
from titanlite.fault.beat import BEAT_SECONDS, beat_of
from titanlite.fault.board import Board, Gone, Link, connect, open_board
from titanlite.fault.decide import SILENCE_SECONDS, TAKEOVER_SECONDS, Decider, Restarts
from titanlite.fault.inspection import RankProcess, inspect
from titanlite.fault.status import Decision, Ended, Inspection, Status, Verdict
from titanlite.launch.nodes import Nodes
from titanlite.launch.terminal import say
from titanlite.launch.workers import Signaled, kill_group
from titanlite.runtime.cluster import RESOLVER, raise_file_limit
from titanlite.runtime.page import read_pages
from titanlite.runtime.rank_files import ATTEMPT, RANKS, STACK, attempt_prefix, rank_file

SAY_SECONDS = 5.0
"""Wait before a launcher prints which node it is waiting for."""
LEAVE_SECONDS = 30.0
"""Time for all launchers to learn that the run has ended."""
OVER_SECONDS = 5.0
"""Time for the verdict on an attempt that a second signal has ended."""
KEYS_A_POLL = 500
"""Keys of a finished attempt deleted per poll; deleting all at once would delay the next one."""
NONE = Restarts()


class NoNode0(RunFailed):
    """Node 0 did not answer at the start; a later start may find it."""

    code = CUT_SHORT


class Node:
    """One launcher's part in a run."""

    def __init__(
        self,
        nodes: Nodes,
        processes: int,
        config: JobConfig,
        private: Path,
        restarts: Restarts = NONE,
        asked: Callable[[], str] = str,
    ) -> None:
        """Connect to node 0; raise RunFailed if it is missing, UserError if two launchers claim to
        be this node.

        The workers' files are in `private`. `asked` returns a reason to stop, for all nodes."""
        self.rank = nodes.rank
        self.processes = processes
        self._nodes = nodes
        self._config = config
        self._private = private
        self._asked = asked
        self._host = socket.gethostname()
        self._kept_at = 0.0
        self._has_logs = False
        self._old_keys: list[str] = []
        """Keys of finished attempts, on node 0."""
        if nodes.count > 1:
            os.environ.setdefault("RES_OPTIONS", RESOLVER)  # for the workers too
        self._decider: Decider | None = None
        decide = None
        if self.rank == 0:
            self._store = _listen(nodes)
            self._decider = Decider(config, nodes.count, time.monotonic(), restarts, nodes.spare)
            decide = self._decider.look
            open_board(self._store, nodes.count)
            self._store.set("run", uuid.uuid4().hex)
        else:
            self._store = _connect(nodes, config.comm.init_timeout_seconds)
        self.address = nodes.master_addr, self._store.port
        """Host and port of the store, which the workers use too."""
        run_id = self._store.get("run").decode()  # waits until the board is open
        claims = self._claim()
        attempt = 1
        if claims > 1:  # a replacement must not seem to be part of the running attempt
            attempt = 0
        own = Status(claims, attempt=attempt, processes=processes)
        link = Link(*self.address, run_id, store=self._store)
        self._board = Board(link, self.rank, nodes.count, own, self._look, self._inspect, decide)
        self._board.start()
        atexit.register(self._end_board)

    @property
    def decision(self) -> Decision:
        return self._board.decision

    @property
    def attempt(self) -> int:
        """Return the number of the running or next attempt."""
        return self._board.own.attempt

    def _claim(self) -> int:
        """Return how many launchers have been this node; raise if another one is alive."""
        store = self._store
        key = f"status/{self.rank}"
        claims = store.add(f"claims/{self.rank}", 1)
        before = store.get(key)
        deadline = time.monotonic() + TAKEOVER_SECONDS
        while claims > 1 and time.monotonic() < deadline:
            if store.get(key) != before:
                raise UserError(
                    f"two launchers use NODE_RANK={self.rank}; every node needs its own"
                )
            time.sleep(0.2)
        store.set(f"incarnation/{self.rank}", str(claims))
        return claims

    # ---------------------------------------------------------------- meet

    def meet(self) -> Decision:
        """Return the decision that makes this node a member of the next attempt, or that ends the
        run.
        """
        board = self._board
        board.put(ended=None, found=None)
        exchanges = board.exchanges

        def is_member(decision: Decision) -> bool:
            if board.exchanges == exchanges or decision.is_final:
                return decision.is_final
            if decision.attempt == self.attempt and self.rank in decision.members:
                return True
            wanted = decision.attempt
            if decision.members:  # a running attempt cannot be joined
                wanted += 1
            if wanted != self.attempt:
                board.put(attempt=wanted)
                if self._nodes.spare and decision.members:
                    say(f"titanlite: node {self.rank} waits as a spare, for attempt {wanted}")
            return False

        decision = self._wait(is_member)
        if decision.is_final:
            self._leave()
        else:
            board.put(found=None)  # inspections from the time as a spare are not of this attempt
        return decision

    def prepare(self, decision: Decision) -> Decision:
        """On node 0, announce that the dump folder is ready; elsewhere, wait for it.

        Return the decision to follow: the given one, unless the run has ended.
        """
        self._board.put(prepared=True)
        seconds = self._config.comm.init_timeout_seconds
        try:
            newest = self._wait(lambda newest: newest.prepared or newest.is_final, seconds)
        except TimeoutError:
            within = f"within {seconds} s (comm.init_timeout_seconds)"
            # Not a RunFailed, so that node 0 learns why this launcher ends.
            raise TimeoutError(
                f"node 0 did not prepare the dump folder {within}; see that node's log"
            ) from None
        if not newest.is_final:
            return decision
        self._leave()
        return newest

    # ---------------------------------------------------------------- run

    def poll(self) -> None:
        """Raise RunFailed, which ends this node's workers, if the attempt has ended elsewhere or
        hangs.
        """
        self._check()
        decision = self.decision
        board = self._board
        if decision.attempt != self.attempt or decision.is_final or decision.failed:
            if decision.report:
                self._kill_ranks()
                raise RunFailed(decision.report)
            raise RunFailed("another node has failed")
        if board.lost_seconds > SILENCE_SECONDS:
            raise RunFailed(f"node 0 has not answered for {SILENCE_SECONDS:.0f} s")
        for key in self._old_keys[-KEYS_A_POLL:]:
            self._store.delete_key(key)
        del self._old_keys[-KEYS_A_POLL:]
        if time.monotonic() - self._kept_at >= BEAT_SECONDS:
            self._keep_beats()

    def _keep_beats(self) -> None:
        """On node 0, write the last heartbeats of all ranks to a file for other processes."""
        self._kept_at = time.monotonic()
        if self.rank > 0:
            return
        beats = {}
        for status in self._board.statuses.values():
            beats |= status.beats
        file = Path(self._config.job.dump_folder, "logs", RANKS)
        with suppress(OSError):
            had_logs = self._has_logs
            self._has_logs = file.parent.exists()
            if had_logs and not self._has_logs:
                say(f"titanlite: {file.parent} was removed; nothing more is written or shown")
            draft = file.with_suffix(".new")
            draft.write_text(json.dumps(beats, default=vars), encoding="utf-8")
            draft.replace(file)

    def _look(self, status: Status) -> Status:
        """Add the beats and stop requests of this node's ranks to a status."""
        pages = read_pages(self._private)
        beats = {}
        for rank, page in pages.items():
            if page.heartbeat:
                beats[rank] = beat_of(self._config, page, self._host)
        asked = self._asked() or next((page.asked for page in pages.values() if page.asked), "")
        if asked and not status.stop:
            self._board.put(stop=asked)  # kept here, since pages are removed after an attempt
            status = replace(status, stop=asked)
        return replace(status, beats=beats)

    def _processes(self) -> dict[int, RankProcess]:
        """Return the processes of this node that can dump their stacks."""
        found = dict[int, RankProcess]()
        for rank, page in read_pages(self._private).items():
            if _leads_session(page.pid):
                found[rank] = RankProcess(page.pid, rank_file(self._private, rank, STACK))
        return found

    def _inspect(self) -> dict[int, Inspection]:
        found = inspect(self._processes())
        if Path(self._config.job.dump_folder, self._config.comm.save_traces_folder).exists():
            time.sleep(2 * BEAT_SECONDS)  # GPU ranks are writing their flight records
        return found

    def _kill_ranks(self) -> None:
        """Kill the ranks that hang: a stopped one takes no other signal, and for the others SIGTERM
        is a request to save.
        """
        for pid, *_ in self._processes().values():
            kill_group(pid)

    # ---------------------------------------------------------------- settle

    def settle(self, ended: Ended) -> Verdict:
        """Report how the attempt ended here, and return the verdict on it."""
        number = self.attempt
        self._board.put(ended=ended)
        seconds = None
        if ended.early and ended.over:  # killed
            seconds = OVER_SECONDS
        verdict = None
        try:
            decision = self._wait(
                lambda decision: decision.attempt > number or decision.is_final, seconds
            )
            verdict = decision.verdict
        except (RunFailed, TimeoutError):
            if not ended.early:
                raise
        if not verdict:
            code = ended.early.code if ended.early else FAILED
            verdict = Verdict(code, early=ended.early)
        if verdict.code is not None:
            self._leave()
        elif self.rank == 0:
            own = attempt_prefix({ATTEMPT: str(number)})
            self._old_keys += [key for key in self._store.list_keys() if key.startswith(own)]
        return verdict

    def leave(self, ended: Ended) -> None:
        """Tell the others that this launcher ends, and why, unless its ranks have left early; take
        only seconds.
        """
        own = self._board.own.ended
        if not own or not own.early:
            self._board.put(ended=ended)
        with suppress(RunFailed):
            self._leave()

    def _leave(self) -> None:
        """Leave the run. Node 0 leaves last, since its store ends with it; the others show in their
        last exchange that they have left.
        """
        board = self._board
        exchanges = self._board.exchanges
        if self._decider:
            board.put(left=True)
        with suppress(RunFailed, TimeoutError):
            self._wait(lambda decision: board.exchanges > exchanges + 1, OVER_SECONDS)
            self._wait(lambda decision: self._are_others_gone(), LEAVE_SECONDS)
        self._keep_beats()
        board.end(left=True)

    def _are_others_gone(self) -> bool:
        if self._decider is None:
            return True
        return all(
            node == 0 or status.left or self._decider.silent[node] > TAKEOVER_SECONDS
            for node, status in self._board.statuses.items()
        )

    # ---------------------------------------------------------------- the board

    def _end_board(self) -> None:
        """End the exchanges when the process exits; a signal only cuts the wait for the last one
        short.
        """
        with suppress(Signaled):
            self._board.end()

    def _waits_for(self) -> str:
        """Return which missing node this launcher waits for, and for how long; otherwise an empty
        string.
        """
        host, port = self.address
        if self._board.problem:
            most = f"{self._config.fault.rejoin_seconds} s (fault.rejoin_seconds)"
            return f"node 0 at {host}:{port}, which does not answer, at most {most}"
        return self._decider.waits_for if self._decider else ""

    def _check(self) -> None:
        board = self._board
        if board.crash:
            raise board.crash
        if board.is_replaced:
            raise RunFailed(
                f"another launcher has taken over NODE_RANK={self.rank}: this one had seemed dead"
            )

    def _wait(
        self, condition: Callable[[Decision], bool], seconds: float | None = None
    ) -> Decision:
        """Return the first decision that meets a condition.

        Raise RunFailed if node 0 does not answer, TimeoutError when the time is up.
        """
        board = self._board
        began = time.monotonic()
        board.is_waiting = True
        said_at = began
        said = ""
        try:
            while True:
                decision = board.decision
                if condition(decision):
                    return decision
                self._check()
                now = time.monotonic()
                words = self._waits_for()
                if words not in ("", said) and now > said_at + SAY_SECONDS:
                    said_at = now
                    said = words
                    say(f"titanlite: waiting for {words}")
                is_gone = isinstance(board.problem, Gone)
                if board.problem and (
                    is_gone or board.lost_seconds > self._config.fault.rejoin_seconds
                ):
                    raise board.problem
                if seconds is not None and time.monotonic() > began + seconds:
                    raise TimeoutError
                time.sleep(0.02)
        finally:
            board.is_waiting = False


def _listen(nodes: Nodes) -> dist.TCPStore:
    """Return the store of node 0."""
    host = nodes.master_addr
    port = nodes.master_port
    raise_file_limit()
    try:
        return dist.TCPStore(host, port, is_master=True, wait_for_workers=False)
    except (dist.DistError, RuntimeError) as error:
        listening = f"listen at {host}:{port}, its MASTER_ADDR and MASTER_PORT"
        raise RunFailed(f"node 0 cannot {listening}: {first_line(error)}") from None


def _connect(nodes: Nodes, seconds: float) -> dist.TCPStore:
    """Return node 0's store; retry while node 0 may still be starting."""
    host = nodes.master_addr
    port = nodes.master_port
    began = time.monotonic()
    is_told = False
    limit = f"{seconds:g} s (comm.init_timeout_seconds)"
    while True:
        try:
            store = connect(host, port)
            store.set_timeout(timedelta(seconds=seconds))
            return store
        except (dist.DistError, RuntimeError, OSError) as error:
            waited = time.monotonic() - began
            reason = getattr(error, "strerror", "")
            reason = (reason or first_line(error)).lower()
            if not is_told and (waited > SAY_SECONDS or isinstance(error, socket.gaierror)):
                is_told = True
                say(f"titanlite: waiting for node 0 at {host}:{port} ({reason}), at most {limit}")
            if waited > seconds:
                remedy = (
                    "that it is started, that MASTER_ADDR is its address, and that the port is open"
                )
                message = f"node 0 did not answer at {host}:{port} within {limit} ({reason})"
                raise NoNode0(f"{message}: check {remedy}") from None
            time.sleep(0.5)


def _leads_session(pid: int) -> bool:
    """Return whether this process is still a worker: workers lead their own sessions."""
    with suppress(ProcessLookupError, PermissionError):
        return os.getsid(pid) == pid
    return False
