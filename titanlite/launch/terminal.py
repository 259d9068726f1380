"""The launcher's terminal: log lines of the chosen ranks as they are written, and a live progress
line.
"""

import errno
import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from titanlite.errors import columns
from titanlite.observe.console import colored, shortened, timed, untimed
from titanlite.observe.sinks import format_duration
from titanlite.runtime.rank_files import FAILED_MARK

NOTICES = "launcher.log"
"""The launcher's own log."""


class Follower:
    """Reads new complete lines of a growing file, which may not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rest = ""

    def lines(self, last: bool = False) -> list[str]:
        """Return the lines since the last call; with `last`, also an unfinished one."""
        try:
            with self._path.open(encoding="utf-8", errors="replace", newline="\n") as file:
                if os.fstat(file.fileno()).st_size < self._offset:  # a resumed run truncated it
                    self._offset = 0
                    self._rest = ""
                file.seek(self._offset)
                text = self._rest + file.read()
                self._offset = file.tell()
        except FileNotFoundError:
            return []
        *complete, self._rest = text.split("\n")
        if last and self._rest:
            complete = [*complete, self._rest]
            self._rest = ""
        return complete


class Terminal:
    """Shows logs from a thread while inside `with`, and the rest of them when leaving it."""

    def __init__(
        self,
        logs: dict[int, Path],
        metrics: Path,
        steps: int,
        color: bool,
        seconds: float = 0.1,
    ) -> None:
        """Read the files every `seconds`."""
        self._seconds = seconds
        self._logs = {rank: Follower(path) for rank, path in logs.items()}
        self._metrics = Follower(metrics)
        self._steps = steps
        self._failed: set[int] = set()
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
            while not self._done.wait(self._seconds):
                self._show(_print)
            self._show(_print, last=True)
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.text import Text

        console = Console()
        bar = BarColumn(bar_width=max(4, min(24, console.width - 36)))
        columns = (TextColumn("{task.description}"), bar, TextColumn("{task.fields[text]}"))
        with Progress(*columns, console=console, transient=True, refresh_per_second=4) as progress:
            task = progress.add_task("starting", total=self._steps, text="")

            def show(line: str) -> None:
                progress.console.print(Text.from_ansi(line))

            while not self._done.wait(self._seconds):
                self._show(show)
                record = self.last_record
                if record:
                    left = (self._steps - record["step"]) * record["step_seconds"]
                    eta = format_duration(record.get("eta_seconds") or left)
                    loss = "not finite"
                    if record["loss"] is not None:
                        loss = f"{record['loss']:.4f}"
                    title = f"step {record['step']}/{self._steps}"
                    text = f"eta {eta}  loss {loss}"
                    if console.width >= 80:  # each step's log line has it too
                        text += f"  {record['tps']:,.0f} tokens/s per device"
                    progress.update(task, completed=record["step"], description=title, text=text)
            self._show(show, last=True)

    def _show(self, show: Any, last: bool = False) -> None:
        for rank, follower in self._logs.items():
            for line in map(untimed, follower.lines(last)):
                if line == FAILED_MARK:  # the launcher prints the first failure itself
                    self._failed.add(rank)
                if rank in self._failed:
                    continue
                if line.startswith("no effect "):  # the launcher has printed this
                    continue
                prefix = f"[rank {rank}] " if len(self._logs) > 1 else ""
                if self._live:
                    line = shortened(line, columns() - len(prefix))
                if self._color:
                    line = colored(line)
                show(prefix + line)
        for line in self._metrics.lines():
            with suppress(ValueError):  # a resume may have replaced the file
                record = json.loads(line)
                if "loss" in record:
                    self.last_record = record
        sys.stdout.flush()


def note(logs: Path, line: str) -> None:
    """Add a line to the launcher's own log."""
    path = logs / NOTICES
    with suppress(OSError), path.open("a", encoding="utf-8", errors="replace") as file:
        file.write(f"{timed(line)}\n")


def say(text: str, file: TextIO | None = None) -> None:
    """Print a launcher message."""
    with _console_may_close():
        _print(text, file)
        (file or sys.stdout).flush()


def _print(line: str, file: TextIO | None = None) -> None:
    """Print a line with its end in one write: another thread may print between two."""
    (file or sys.stdout).write(f"{line}\n")


@contextmanager
def _console_may_close() -> Iterator[None]:
    """Continue if the console is gone, as in `titanlite train | head` or after a logout; log files
    remain.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
