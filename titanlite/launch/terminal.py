"""The launcher's terminal: the log lines of the chosen ranks as they are written, and one live line of progress."""

import errno
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from titanlite.observe.console import colored
from titanlite.observe.metrics import format_duration


class Follower:
    """Reads the complete new lines of a growing file, which may not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._rest = path, 0, ""

    def lines(self, last: bool = False) -> list[str]:
        """Return the lines since the last call; with `last`, also one without a newline at its end."""
        try:
            with self._path.open(encoding="utf-8", errors="replace", newline="\n") as file:
                if os.fstat(file.fileno()).st_size < self._offset:  # a resumed run truncated it
                    self._offset, self._rest = 0, ""
                file.seek(self._offset)
                text = self._rest + file.read()
                self._offset = file.tell()
        except FileNotFoundError:
            return []
        *complete, self._rest = text.split("\n")
        if last and self._rest:
            complete, self._rest = [*complete, self._rest], ""
        return complete


class Terminal:
    """Shows logs from a thread inside `with`, at whose end everything written so far has been shown."""

    def __init__(
        self, logs: dict[int, Path], metrics: Path, steps: int, color: bool, notices: Callable[[], list[str]] = list
    ) -> None:
        self._logs = {rank: Follower(path) for rank, path in logs.items()}
        self._metrics, self._steps, self._notices = Follower(metrics), steps, notices
        self.last_record: dict[str, Any] = {}
        self._live = sys.stdout.isatty()
        self._color = color and self._live
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="terminal", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        with _console_may_close():
            self._show_until_stopped()

    def _show_until_stopped(self) -> None:
        if not self._live:
            while not self._done.wait(0.1):
                self._show(print)
            self._show(print, last=True)
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.text import Text

        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.fields[text]}"))
        with Progress(*columns, console=Console(), transient=True, refresh_per_second=4) as progress:
            task = progress.add_task("starting", total=self._steps, text="")

            def show(line: str) -> None:
                progress.console.print(Text.from_ansi(line), soft_wrap=True)

            while not self._done.wait(0.1):
                self._show(show)
                if record := self.last_record:
                    eta = format_duration((self._steps - record["step"]) * record["step_seconds"])
                    loss = "not finite" if record["loss"] is None else f"{record['loss']:.4f}"
                    text = f"eta {eta}  loss {loss}  {record['tps']:,.0f} tokens/s per device"
                    title = f"step {record['step']}/{self._steps}"
                    progress.update(task, completed=record["step"], description=title, text=text)
            self._show(show, last=True)

    def _show(self, show: Any, last: bool = False) -> None:
        for line in [] if last else self._notices():
            show(line)
        for rank, follower in self._logs.items():
            for line in follower.lines(last):
                line = colored(line) if self._color else line
                show(line if len(self._logs) == 1 else f"[rank {rank}] {line}")
        for line in self._metrics.lines():
            with suppress(ValueError):  # a resume may have put another file in its place
                record = json.loads(line)
                if "loss" in record:
                    self.last_record = record
        sys.stdout.flush()


def say(text: str) -> None:
    """Print what the launcher has to say."""
    with _console_may_close():
        print(text, flush=True)


@contextmanager
def _console_may_close() -> Iterator[None]:
    """Continue when the console is gone, as in `titanlite train | head` or after a logout: there are log files."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
