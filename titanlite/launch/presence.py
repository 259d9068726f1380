"""The launchers' store over a network that may fail: time limits, new connections, a sign of life of each launcher.

A connection that was cut answers nothing for as long as TCP likes, and a wait in it could not be interrupted.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import TypeVar

import torch.distributed as dist

from titanlite.errors import RunFailed, first_line
from titanlite.runtime.rank_files import STOP

T = TypeVar("T")
SILENCE_SECONDS = 15.0
"""Without a sign of life of a launcher, after which its node counts as lost."""
ANSWER_SECONDS, CONNECT_SECONDS, BEAT_SECONDS = 5.0, 2.0, 0.5
REFUSED_SECONDS = 10.0
"""After which a host that refuses connections has no launcher any more: it could be reached."""


class Unreachable(RunFailed):
    """Node 0 did not answer in time, or is gone."""


class Link:
    """A connection to the launchers' store, of one thread."""

    def __init__(self, host: str, port: int, run: str, store: dist.TCPStore | None = None) -> None:
        """Use `store` until it fails; `run` is the value of the key `run` in the right one."""
        self._host, self._port, self._run, self._store = host, port, run, store

    def ask(self, operation: Callable[[dist.TCPStore], T], seconds: float) -> T:
        """Return what an operation returns, which may be done twice; raise Unreachable when the time is over."""
        began, refused_at = time.monotonic(), 0.0
        while True:
            try:
                return self._try(operation)
            except (dist.DistError, RuntimeError, OSError) as error:
                self._store, now = None, time.monotonic()
                refused_at = (refused_at or now) if isinstance(error, ConnectionRefusedError) else 0.0
                if isinstance(error, Unreachable) or (refused_at and now > refused_at + REFUSED_SECONDS):
                    raise Unreachable("node 0's launcher, which hosts the store of the run, has ended") from None
                if now > began + seconds:
                    silence = f"did not answer for {now - began:.0f} s"
                    raise Unreachable(f"node 0 at {self._host}:{self._port} {silence}: {first_line(error)}") from None
                time.sleep(BEAT_SECONDS)

    def read(self, key: str, seconds: float) -> bytes | None:
        """Return the value of a key; None if there is none."""
        return self.ask(lambda store: store.get(key) if store.check([key]) else None, seconds)

    def write(self, key: str, value: str, seconds: float) -> None:
        self.ask(lambda store: store.set(key, value), seconds)

    def _try(self, operation: Callable[[dist.TCPStore], T]) -> T:
        """Do it in a thread, which is left behind if it gets no answer."""
        answers: SimpleQueue[tuple[bool, T | Exception]] = SimpleQueue()

        def work() -> None:
            try:
                self._store = self._store or self._connect()
                answers.put((True, operation(self._store)))
            except Exception as error:
                answers.put((False, error))

        threading.Thread(target=work, name="launchers' store", daemon=True).start()
        try:
            is_answer, answer = answers.get(timeout=ANSWER_SECONDS)
        except Empty:
            raise OSError("no answer") from None
        if not is_answer:
            raise answer  # type: ignore[misc]
        return answer  # type: ignore[return-value]

    def _connect(self) -> dist.TCPStore:
        socket.create_connection((self._host, self._port), CONNECT_SECONDS).close()  # torch tries again if refused
        limit = timedelta(seconds=CONNECT_SECONDS)
        store = dist.TCPStore(self._host, self._port, is_master=False, wait_for_workers=False, timeout=limit)
        if store.get("run").decode() != self._run:
            raise Unreachable("another run")
        return store


class Presence(threading.Thread):
    """Shows the other launchers that this one lives, and exchanges with them and the ranks what cannot wait."""

    def __init__(self, link: Link, node: int, nodes: int, incarnation: int) -> None:
        super().__init__(name="presence", daemon=True)
        self._link, self._node, self._nodes, self._incarnation = link, node, nodes, incarnation
        self._moved: dict[int, tuple[bytes, float]] = {}
        self._ended = threading.Event()
        self._lost_at = 0.0
        self.silent: dict[int, float] = {}
        """On node 0: how many seconds ago each other node gave its last sign of life."""
        self.attempt = 1
        """The attempt that may fail on another node."""
        self.failed_attempt = 0
        """The newest attempt of which a node has said that it failed."""
        self.is_replaced = False
        """Whether another launcher has taken this node's place, since this one seemed dead."""
        self.stop = ""
        """Why the run is asked to stop: set it, and all launchers and ranks learn of it; or one of them did."""

    @property
    def lost_seconds(self) -> float:
        """Since when node 0 does not answer."""
        return time.monotonic() - self._lost_at if self._lost_at else 0.0

    def run(self) -> None:
        count = 0
        while not self._ended.wait(BEAT_SECONDS):
            count += 1
            began = time.monotonic()
            try:
                self._link.ask(lambda store, count=count: self._exchange(store, count), 0)
                self._lost_at = 0.0
            except RunFailed:
                self._lost_at = self._lost_at or began

    def end(self) -> None:
        self._ended.set()

    def _exchange(self, store: dist.TCPStore, count: int) -> None:
        own = f"launcher/{self._node}"
        if store.check([own]) and int(store.get(own).split()[0]) > self._incarnation:
            self.is_replaced = True
            return
        store.set(own, f"{self._incarnation} {count}")
        if store.check([f"failed/{(attempt := self.attempt)}"]):
            self.failed_attempt = attempt
        if store.check([STOP]):
            self.stop = self.stop or store.get(STOP).decode()
        elif self.stop:
            store.set(STOP, self.stop)
        for node in range(1, self._nodes) if self._node == 0 else ():
            if store.check([key := f"launcher/{node}"]):
                value, (last, since) = store.get(key), self._moved.get(node, (b"", 0.0))
                now = time.monotonic()
                self._moved[node] = (value, since if value == last else now)
                self.silent[node] = now - self._moved[node][1]
