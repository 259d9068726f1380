"""A rank's log, and the colors that a terminal adds to it."""

import logging
import re
import sys
from pathlib import Path

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


def open_log(dump_folder: Path, rank: int, launched: bool, shown: bool) -> logging.Logger:
    """Return the logger of this rank.

    Below titanlite's launcher it writes to standard output, which the launcher keeps in the rank's
    log file. Below torchrun or srun (not `launched`) it writes the log file itself, and to the
    console on `shown` ranks."""
    log = logging.Logger(f"titanlite.rank{rank}", logging.INFO)
    if launched or shown:
        log.addHandler(logging.StreamHandler(sys.stdout))
    if not launched:
        path = rank_log(dump_folder, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        log.addHandler(logging.FileHandler(path, encoding="utf-8", errors="replace"))
    return log


def colored(line: str) -> str:
    """Return a step's line with a color for each field; any other line unchanged."""
    if not line.startswith("step:"):
        return line
    return re.sub(
        r"(\w+):( +)(\S+)", lambda m: f"\033[{_ANSI_COLORS.get(m[1], _GRAY)}m{m[0]}\033[0m", line
    )


def shortened(line: str, width: int) -> str:
    """Return a step's line without the last fields that exceed the width; any other line
    unchanged.
    """
    if not line.startswith("step:"):
        return line
    fields = re.split(r"  (?=\w+: )", line)
    while len("  ".join(fields)) > width and len(fields) > 2:  # step and loss stay
        fields.pop()
    return "  ".join(fields)
