"""What a rank says: its log, and the colors that a terminal adds to it."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path

LAUNCHED = "TITANLITE_LAUNCHED"
"""The launcher's process id. It keeps each rank's output in its log file, and shows the chosen ranks'."""

_COLOURS = {
    "step": 31,
    "loss": 32,
    "grad_norm": 33,
    "memory": 36,
    "tps": 34,
    "tflops": 35,
    "mfu": 36,
    "eta": 90,
    "data": 90,
}


def rank_log(folder: Path, rank: int) -> Path:
    """The log file of a rank."""
    return folder / "logs" / f"rank-{rank}.log"


def open_log(dump_folder: Path, rank: int, launched: bool, shown: bool) -> logging.Logger:
    """The logger of this rank.

    Started by our launcher, all output is the rank's log file. Started by torchrun or srun, the log file is
    written from here, and only `shown` ranks speak on the console.
    """
    log = logging.Logger(f"titanlite.rank{rank}", logging.INFO)
    handlers: list[logging.Handler] = []
    if launched or shown:
        handlers.append(logging.StreamHandler(sys.stdout))
    if not launched:
        path = rank_log(dump_folder, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(path, encoding="utf-8"))
    for handler in handlers:
        handler.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(handler)
    return log


def colored(line: str) -> str:
    """A step's line with a color for each field; other lines as they are."""
    if not line.startswith("step:"):
        return line
    return re.sub(
        r"(\w+):( +)(\S+)",
        lambda m: f"\033[{_COLOURS.get(m[1], 0)}m{m[1]}:{m[2]}{m[3]}\033[0m",
        line,
    )
