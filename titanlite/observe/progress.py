"""Progress of a long command, on stderr: a bar in a terminal, else a line every ten seconds."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from titanlite.errors import format_bytes, print_notice
from titanlite.observe.sinks import format_duration

T = TypeVar("T")
Progress = Callable[[int, int], None]
"""Shows how much is done, and the total."""
LINE_SECONDS = 10


def _texts(title: str, unit: str, began: float) -> Callable[[int, int, float], str]:
    """Return a function that describes progress, with the rate and the time left."""
    first = -1

    def text(done: int, total: int, now: float) -> str:
        nonlocal first
        if first < 0:  # work done by an earlier run took no time in this one
            first = done
        return title + describe(done, total, done - first, now - began, unit)

    return text


def progress_lines(say: Callable[[str], object], title: str, unit: str) -> Progress:
    """Return a function that prints progress every ten seconds."""
    shown = time.monotonic()
    text = _texts(title, unit, shown)

    def show(done: int, total: int) -> None:
        nonlocal shown
        now = time.monotonic()
        line = text(done, total, now)
        if now - shown >= LINE_SECONDS:
            shown = now
            say(line)

    return show


@contextmanager
def progress_bar(unit: str, title: str = "") -> Iterator[Progress]:
    """Yield a function that shows progress: a bar in a terminal, lines elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    if not console.is_terminal:
        yield progress_lines(print_notice, title, unit)
        return
    with Bar(
        BarColumn(),
        TextColumn("{task.description}", markup=False),
        console=console,
        transient=True,
    ) as bar:
        task = bar.add_task("", total=None)
        text = _texts(title, unit, time.monotonic())

        def show(done: int, total: int) -> None:
            line = text(done, total, time.monotonic())
            bar.update(task, completed=done, total=total, description=line)

        yield show


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Print every ten seconds how long this has taken, for work of unknown length."""
    began = time.monotonic()
    over = threading.Event()

    def say() -> None:
        while not over.wait(LINE_SECONDS):
            print_notice(f"{what}, {format_duration(time.monotonic() - began)} so far")

    thread = threading.Thread(target=say, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def describe(done: int, total: int, added: int, seconds: float, unit: str) -> str:
    """Return how much is done, the rate, and the time left."""
    amount: Callable[[float], str] = format_bytes
    if unit != "bytes":
        amount = "{:,.4g}".format
    text = f"{amount(done)} of {amount(total)}"
    if unit != "bytes":
        text += f" {unit}"
    if not added or not seconds:
        return text
    left = format_duration((total - done) * seconds / added)
    rate = added / seconds
    speed = f"{amount(rate)}/s" if rate >= 1 else f"{amount(60 * rate)}/min"
    return f"{text}, {speed}, {left} left"


def track(
    items: Iterable[T], total: int, unit: str, size: Callable[[T], int] = lambda _: 1
) -> Iterator[T]:
    """Yield the items, and show the progress through them."""
    done = 0
    with progress_bar(unit) as show:
        for item in items:
            show(done, total)
            yield item
            done += size(item)
