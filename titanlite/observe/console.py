"""A rank's log, and the colors that a terminal adds to it."""

import logging
import re
import sys
import time
from pathlib import Path

TIME = "%Y-%m-%d %H:%M:%S "
"""Prefix of each line of a log file."""
_TIME = re.compile(r"(?m)^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ")

_ANSI_COLORS = {
    "step": 31,
    "loss": 32,
    "grad_norm": 33,
    "memory": 36,
    "tps": 34,
    "tflops": 35,
    "mfu": 36,
}
_GRAY = 90


def rank_log(folder: Path, rank: int) -> Path:
    """Return the path of a rank's log file."""
    return folder / "logs" / f"rank-{rank}.log"


def timed(text: str, at: float | None = None) -> str:
    """Return text as in log files: with the time, in UTC, before each line."""
    begin = time.strftime(TIME, time.gmtime(at))
    return "\n".join(f"{begin}{line}" for line in text.split("\n"))


def untimed(text: str) -> str:
    """Return lines of a log file without their times."""
    return _TIME.sub("", text)


class Timed(logging.Formatter):
    """Puts the time before each line."""

    def format(self, record: logging.LogRecord) -> str:
        return timed(super().format(record), record.created)


def open_log(dump_folder: Path, rank: int, launched: bool, shown: bool) -> logging.Logger:
    """Return the logger of this rank.

    Under titanlite's launcher it writes to standard output, which the launcher redirects to the
    rank's log file. Under torchrun or srun (not `launched`) it writes the log file itself, and to
    the console on `shown` ranks."""
    log = logging.Logger(f"titanlite.rank{rank}", logging.INFO)
    console = logging.StreamHandler(sys.stdout)
    files: list[logging.Handler] = [console]
    if not launched:
        path = rank_log(dump_folder, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        files = [logging.FileHandler(path, encoding="utf-8", errors="replace")]
    for handler in files:
        handler.setFormatter(Timed())
        log.addHandler(handler)
    if shown and not launched:
        log.addHandler(console)
    return log


def colored(line: str) -> str:
    """Return a step's line with a color for each field; leave other lines unchanged."""
    if not line.startswith("step:"):
        return line
    return re.sub(
        r"(\w+):( +)(\S+)", lambda m: f"\033[{_ANSI_COLORS.get(m[1], _GRAY)}m{m[0]}\033[0m", line
    )


def shortened(line: str, width: int) -> str:
    """Return a step's line without trailing fields that exceed the width; leave other lines
    unchanged.
    """
    if not line.startswith("step:"):
        return line
    fields = re.split(r"  (?=\w+: )", line)
    while len("  ".join(fields)) > width and len(fields) > 2:  # step and loss stay
        fields.pop()
    return "  ".join(fields)
