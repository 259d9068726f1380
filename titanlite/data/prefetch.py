"""Reading in a thread, ahead of the one who needs it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """The items of an iterable, read once; an error is raised where it would have been, and the end stays the end."""

    def __init__(self, items: Iterable[T], depth: int, timeout: float | None = None) -> None:
        self._timeout = timeout
        self._ready: queue.Queue[tuple[T] | BaseException | None] = queue.Queue(maxsize=depth)
        self._stopped = threading.Event()
        # The items are the thread's alone: kept here as well, a loader among them could end up in a cycle, and its
        # workers take 5 seconds each to end when the garbage collector ends them.
        self._thread = threading.Thread(target=self._run, args=(items,), name="data", daemon=True)
        self._thread.start()

    def _run(self, items: Iterable[T]) -> None:
        last: BaseException | None = None
        try:
            for item in items:
                if not self._put((item,)):
                    return
        except BaseException as error:
            last = error
        self._put(last)

    def _put(self, item: tuple[T] | BaseException | None) -> bool:
        while not self._stopped.is_set():
            try:
                self._ready.put(item, timeout=0.2)
                return True
            except queue.Full:
                continue
        return False

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        """The next item; TimeoutError where none came in time."""
        try:
            item = self._ready.get(timeout=self._timeout)
        except queue.Empty:
            raise TimeoutError(f"nothing came for {self._timeout:g} seconds") from None
        if isinstance(item, tuple):
            return item[0]
        self._ready.put(item)
        if item is None:
            raise StopIteration
        raise item

    def stop(self) -> None:
        """Read no further; whoever is stuck in a read is left behind."""
        self._stopped.set()

    def close(self) -> None:
        """Stop, and wait for the thread; idempotent."""
        self.stop()
        self._thread.join()
