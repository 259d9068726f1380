"""Prefetch items in a background thread."""

import queue
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """Iterate over `items` once in a background thread, at most `depth` items ahead.

    `next` raises an error of the thread in its place; after the end or an error, every further
    `next` repeats it.
    """

    def __init__(self, items: Iterable[T], depth: int) -> None:
        self._ready: queue.Queue[tuple[T] | BaseException | None] = queue.Queue(maxsize=depth)
        self._stopped = threading.Event()
        # Only the thread refers to the items. A second reference here could put a loader into a
        # reference cycle, and its workers take 5 seconds each if the garbage collector ends them.
        self._thread = threading.Thread(target=self._run, args=(items,), name="data", daemon=True)
        self._thread.start()

    def _run(self, items: Iterable[T]) -> None:
        end: BaseException | None = None
        try:
            for item in items:
                if not self._put((item,)):
                    return
        except BaseException as error:
            end = error
        self._put(end)

    def _put(self, item: tuple[T] | BaseException | None) -> bool:
        while not self._stopped.is_set():
            with suppress(queue.Full):
                self._ready.put(item, timeout=0.2)
                return True
        return False

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        item = self._ready.get()
        if isinstance(item, tuple):
            return item[0]
        self._ready.put(item)
        if item is None:
            raise StopIteration
        raise item

    def close(self) -> None:
        """Stop reading and wait for the thread; may be called more than once."""
        self._stopped.set()
        self._thread.join()
