"""The board where launchers, or ranks under torchrun or srun, post their statuses and read node 0's
decision.

It is a store on node 0, behind a network that may fail: a cut connection may stay silent until TCP
gives up, and waiting for it cannot be interrupted. So each process uses one thread and one
connection for the board."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import TypeVar

import torch.distributed as dist

from titanlite.errors import RunFailed, first_line
from titanlite.fault.status import Decision, Inspection, Status, dump, parse

T = TypeVar("T")
ANSWER_SECONDS = 5.0
CONNECT_SECONDS = 2.0
REFUSED_SECONDS = 10.0
"""Time after which a reachable host that refuses connections has lost its launcher."""
EXCHANGE_SECONDS = 0.5
"""Time between exchanges while ranks train."""
MOST_KEYS = 1024
WAITING_SECONDS = 0.05
"""Time per node between exchanges of a launcher that waits for a decision."""


class NoAnswer(RunFailed):
    """Node 0 did not answer in time, or is gone."""


class Gone(NoAnswer):
    """Node 0's launcher has ended."""

    def __init__(self) -> None:
        super().__init__("node 0's launcher, which hosts the store of the run, has ended")


def connect(host: str, port: int) -> dist.TCPStore:
    """Return a connection to a store; raise OSError at once if nothing listens."""
    # torch would retry, and print its stack.
    socket.create_connection((host, port), CONNECT_SECONDS).close()
    limit = timedelta(seconds=CONNECT_SECONDS)
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)


class Link:
    """One thread's connection to the store, renewed when it fails."""

    def __init__(
        self,
        host: str,
        port: int,
        run: str = "",
        prefix: str = "",
        store: dist.TCPStore | None = None,
    ) -> None:
        """Use `store` until it fails; `run` tells this run's store from another run's on the same
        port.
        """
        self._host = host
        self._port = port
        self._run = run
        self._prefix = prefix
        self._store = self._prefixed(store) if store else None
        self._refused_at = math.inf
        """Since when all connections have been refused."""

    def ask(self, operation: Callable[[dist.Store], T], seconds: float) -> T:
        """Return the result of an operation, which may be repeated; raise NoAnswer when the time
        is up.
        """
        began = time.monotonic()
        while True:
            try:
                return self._try(operation)
            except (RuntimeError, OSError) as error:
                self._store = None
                now = time.monotonic()
                if not isinstance(error, ConnectionRefusedError):
                    self._refused_at = math.inf
                elif self._refused_at == math.inf:
                    self._refused_at = now
                if isinstance(error, Gone) or now > self._refused_at + REFUSED_SECONDS:
                    raise Gone from None
                if now > began + seconds:
                    silence = f"did not answer for {now - began:.0f} s"
                    raise NoAnswer(
                        f"node 0 at {self._host}:{self._port} {silence}: {first_line(error)}"
                    ) from None
                time.sleep(EXCHANGE_SECONDS)

    def _try(self, operation: Callable[[dist.Store], T]) -> T:
        """Try it in a thread, which is abandoned if it gets no answer."""
        answers: SimpleQueue[tuple[bool, T | Exception]] = SimpleQueue()

        def work() -> None:
            try:
                self._store = self._store or self._connect()
                answers.put((True, operation(self._store)))
            except Exception as error:
                answers.put((False, error))

        threading.Thread(target=work, name="store", daemon=True).start()
        try:
            is_answer, answer = answers.get(timeout=ANSWER_SECONDS)
        except Empty:
            raise OSError("no answer") from None
        if not is_answer:
            raise answer  # type: ignore[misc]
        return answer  # type: ignore[return-value]

    def _connect(self) -> dist.Store:
        store = connect(self._host, self._port)
        if self._run and store.get("run").decode() != self._run:
            raise Gone  # another run is using the port
        return self._prefixed(store)

    def _prefixed(self, store: dist.TCPStore) -> dist.Store:
        if self._prefix:
            return dist.PrefixStore(self._prefix, store)
        return store


class Board(threading.Thread):
    """One process's side of the board."""

    def __init__(
        self,
        link: Link,
        number: int,
        count: int,
        own: Status,
        look: Callable[[Status], Status],
        inspect: Callable[[], dict[int, Inspection]],
        decide: Callable[[Mapping[int, Status], float], Decision] | None = None,
        interval: float = EXCHANGE_SECONDS,
    ) -> None:
        """Be `number` of `count`. `look` adds the beats of this node's ranks to a status; number 0
        has `decide`.
        """
        super().__init__(name="board", daemon=True)
        self._link = link
        self._number = number
        self._count = count
        self._look = look
        self._inspect = inspect
        self._decide = decide
        self._interval = interval
        self.own = own
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._ended = threading.Event()
        self._lost_at = 0.0
        self._is_open = self._is_last = False
        self.decision = Decision()
        self.statuses: dict[int, Status] = {}
        """Everyone's status so far; only for number 0."""
        self.exchanges = 0
        """Number of completed exchanges."""
        self.is_waiting = False
        """Whether someone waits for a decision."""
        self.is_replaced = False
        """Whether another launcher has replaced this one, which seemed dead."""
        self.problem: NoAnswer | None = None
        """Why node 0 does not answer."""
        self.crash: BaseException | None = None
        """What ended the thread prematurely."""

    @property
    def lost_seconds(self) -> float:
        """Return the seconds since node 0 last answered; 0 if it does answer."""
        if self._lost_at:
            return time.monotonic() - self._lost_at
        return 0.0

    def put(self, **changes: object) -> None:
        """Change this process's status, and post it at once."""
        with self._lock:
            self.own = replace(self.own, **changes)  # type: ignore[arg-type]
        self._wake.set()

    def end(self, **changes: object) -> None:
        """Change this process's status, end the thread once that is posted, and wait for it: torch
        aborts a process that exits during an exchange.
        """
        with self._lock:  # no exchange may follow, since node 0 need not wait for one
            self.own = replace(self.own, **changes)  # type: ignore[arg-type]
            self._ended.set()
        self._wake.set()
        self.join(2 * ANSWER_SECONDS)

    def run(self) -> None:
        while True:
            self._wake.clear()
            began = time.monotonic()
            try:
                self.exchange()
                self._lost_at = 0.0
                self.problem = None
                self.exchanges += 1
            except NoAnswer as error:
                self._lost_at = self._lost_at or began
                self.problem = error
            except BaseException as error:  # raised where a decision is waited for
                self.crash = error
                return
            if self._is_last:
                return
            seconds = self._interval
            if self.is_waiting:
                seconds = min(seconds, WAITING_SECONDS * self._count)
            self._wake.wait(seconds)

    def exchange(self) -> None:
        """Post this process's status and read the decision, which number 0 makes."""
        with self._lock:
            own = self.own = replace(self.own, count=self.own.count + 1)
            self._is_last = self._ended.is_set()
        own = self._look(own)
        if self.decision.hangs and own.found is None:
            found = self._inspect()
            self.put(found=found)
            own = replace(own, found=found)
        texts = self._link.ask(lambda store: self._show(store, own), 0)
        if self.is_replaced or texts is None:
            return
        if self._decide is None:
            self.decision = parse(Decision, texts[0])
            return
        self.statuses = {node: parse(Status, text) for node, text in enumerate(texts) if text}
        decision = self._decide(self.statuses, time.monotonic())
        # An exchange that timed out may have written an older one.
        if decision != self.decision or self.problem:
            self._link.ask(lambda store: store.set("decision", dump(decision)), 0)
            self.decision = decision

    def _show(self, store: dist.Store, own: Status) -> list[bytes] | None:
        """Post a status; return the decision, or all statuses to number 0; None until the board is
        open.
        """
        self._is_open = self._is_open or store.check(["decision"])
        if not self._is_open:
            return None
        if int(store.get(f"incarnation/{self._number}")) > own.incarnation:
            self.is_replaced = True
            return None
        store.set(f"status/{self._number}", dump(own))
        if self._decide is None:
            return [store.get("decision")]
        texts: list[bytes] = []
        for first in range(0, self._count, MOST_KEYS):  # torch's time is quadratic in the keys
            numbers = range(first, min(first + MOST_KEYS, self._count))
            texts += store.multi_get([f"status/{number}" for number in numbers])
        return texts


def open_board(store: dist.Store, count: int) -> None:
    """Give each of `count` participants an empty status, since reading a missing key waits."""
    for number in range(count):
        store.set(f"status/{number}", "")
        store.set(f"incarnation/{number}", "0")
    store.set("decision", dump(Decision()))
