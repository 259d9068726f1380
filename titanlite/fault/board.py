"""The board where launchers, or ranks below torchrun or srun, put their statuses and read node 0's
decision.

It is a store on node 0, over a network that may fail: a connection that was cut answers nothing for
as long as TCP likes, and a wait in it could not be interrupted. Each process has one thread and one
connection for all of it."""

from __future__ import annotations

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
"""After which a host that refuses connections has no launcher any more: it could be reached."""
EXCHANGE_SECONDS = 0.5
"""Between two exchanges while ranks train."""
MOST_KEYS = 1024
WAITING_SECONDS = 0.05
"""For each node between two exchanges of a launcher that waits for a decision."""


class Unreachable(RunFailed):
    """Node 0 did not answer in time, or is gone."""


class Gone(Unreachable):
    """Node 0's launcher has ended."""

    def __init__(self) -> None:
        super().__init__("node 0's launcher, which hosts the store of the run, has ended")


def connect(host: str, port: int) -> dist.TCPStore:
    """Return a connection to a store; raise OSError at once where nothing listens."""
    socket.create_connection(
        (host, port), CONNECT_SECONDS
    ).close()  # torch would try again, and print its frames
    limit = timedelta(seconds=CONNECT_SECONDS)
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)


class Link:
    """A connection to the store of one thread, made again when it fails."""

    def __init__(
        self,
        host: str,
        port: int,
        run: str = "",
        prefix: str = "",
        store: dist.TCPStore | None = None,
    ) -> None:
        """Use `store` until it fails; the key `run` separates this run's store from another's on
        the same port.
        """
        self._host, self._port, self._run, self._prefix = host, port, run, prefix
        self._store = self._prefixed(store) if store else None
        self._refused_at = 0.0

    def ask(self, operation: Callable[[dist.Store], T], seconds: float) -> T:
        """Return the result of an operation, which may be done twice; raise Unreachable when the
        time is over.
        """
        began = time.monotonic()
        while True:
            try:
                return self._try(operation)
            except (RuntimeError, OSError) as error:
                self._store, now = None, time.monotonic()
                is_refused = isinstance(error, ConnectionRefusedError)
                self._refused_at = (self._refused_at or now) if is_refused else 0.0
                if isinstance(error, Gone) or (
                    is_refused and now > self._refused_at + REFUSED_SECONDS
                ):
                    raise Gone from None
                if now > began + seconds:
                    silence = f"did not answer for {now - began:.0f} s"
                    raise Unreachable(
                        f"node 0 at {self._host}:{self._port} {silence}: {first_line(error)}"
                    ) from None
                time.sleep(EXCHANGE_SECONDS)

    def _try(self, operation: Callable[[dist.Store], T]) -> T:
        """Do it in a thread, which is left behind if it gets no answer."""
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
            raise Gone  # another run is there now
        return self._prefixed(store)

    def _prefixed(self, store: dist.TCPStore) -> dist.Store:
        return dist.PrefixStore(self._prefix, store) if self._prefix else store


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
        self._link, self._number, self._count = link, number, count
        self._look, self._inspect, self._decide, self._interval = look, inspect, decide, interval
        self.own = own
        self._lock = threading.Lock()
        self._wake, self._ended = threading.Event(), threading.Event()
        self._lost_at = 0.0
        self._is_open = False
        self.decision = Decision()
        self.statuses: dict[int, Status] = {}
        """Of all that came; for number 0."""
        self.exchanges = 0
        """Counted at their ends."""
        self.is_waiting = False
        """Whether someone waits for a decision."""
        self.is_replaced = False
        """Whether another launcher has taken this node's place, since this one seemed dead."""
        self.problem: Unreachable | None = None
        """Why node 0 does not answer."""
        self.crash: BaseException | None = None
        """What ended the thread before its time."""

    @property
    def lost_seconds(self) -> float:
        """Return the seconds since node 0 answered."""
        return time.monotonic() - self._lost_at if self._lost_at else 0.0

    def put(self, **changes: object) -> None:
        """Change the own status, and show it at once."""
        with self._lock:
            self.own = replace(self.own, **changes)  # type: ignore[arg-type]
        self._wake.set()

    def end(self) -> None:
        """End the thread after one more exchange, and wait for it: torch aborts a process that
        exits meanwhile.
        """
        self._ended.set()
        self._wake.set()
        self.join(2 * ANSWER_SECONDS)

    def run(self) -> None:
        while True:
            is_last = self._ended.is_set()
            self._wake.clear()
            began = time.monotonic()
            try:
                self.exchange()
                self._lost_at, self.problem = 0.0, None
                self.exchanges += 1
            except Unreachable as error:
                self._lost_at, self.problem = self._lost_at or began, error
            except BaseException as error:  # whoever waits for a decision raises it
                self.crash = error
                return
            if is_last:
                return
            waiting = min(self._interval, WAITING_SECONDS * self._count)
            self._wake.wait(waiting if self.is_waiting else self._interval)

    def exchange(self) -> None:
        """Put the own status, read the decision; number 0 makes it."""
        with self._lock:
            own = self.own = replace(self.own, count=self.own.count + 1)
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
        if (
            decision != self.decision or self.problem
        ):  # an exchange that timed out may have written an older one
            self._link.ask(lambda store: store.set("decision", dump(decision)), 0)
            self.decision = decision

    def _show(self, store: dist.Store, own: Status) -> list[bytes] | None:
        """Put a status; return the decision, or for number 0 all statuses; None before the board is
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
        for first in range(
            0, self._count, MOST_KEYS
        ):  # torch reads a longer request in quadratic time
            numbers = range(first, min(first + MOST_KEYS, self._count))
            texts += store.multi_get([f"status/{number}" for number in numbers])
        return texts


def open_board(store: dist.Store, count: int) -> None:
    """Give each of `count` participants an empty status, since reading a key that is missing waits
    for it.
    """
    for number in range(count):
        store.set(f"status/{number}", "")
        store.set(f"incarnation/{number}", "0")
    store.set("decision", dump(Decision()))
