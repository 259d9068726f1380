"""How far a long command is, on stderr: a bar in a terminal, elsewhere a line every ten seconds."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from titanlite.errors import format_bytes
from titanlite.observe.metrics import format_duration

T = TypeVar("T")
Progress = Callable[[int, int], None]
"""Shows how much is done, and of how much."""
LINE_SECONDS = 10


@contextmanager
def progress_bar(unit: str) -> Iterator[Progress]:
    """Yield a function that shows progress in a unit, with the rate and the time left."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    with Bar(
        BarColumn(),
        TextColumn("{task.description}", markup=False),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task("", total=None)
        began = shown = time.monotonic()
        first = -1

        def show(done: int, total: int) -> None:
            nonlocal shown, first
            now = time.monotonic()
            first = done if first < 0 else first  # what an earlier run had done took no time
            text = describe(done, total, done - first, now - began, unit)
            bar.update(task, completed=done, total=total, description=text)
            if not console.is_terminal and now - shown >= LINE_SECONDS:
                shown = now
                print(f"titanlite: {text}", file=sys.stderr, flush=True)

        yield show


def describe(done: int, total: int, added: int, seconds: float, unit: str) -> str:
    """Return how much is done, at what rate, and the time left."""
    amount: Callable[[float], str] = format_bytes if unit == "bytes" else "{:,.4g}".format
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
    """Yield the items, and show how much of them is done."""
    done = 0
    with progress_bar(unit) as show:
        for item in items:
            show(done, total)
            yield item
            done += size(item)
