"""Which rank of this node failed first, and its message. No torch."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlite.errors import FAILED, GIVEN_UP, REFUSED
from titanlite.fault.status import Failure
from titanlite.observe.console import rank_log, untimed
from titanlite.runtime.rank_files import ERROR, rank_file

CRASH = "Fatal Python error"
"""Begins the stack that faulthandler writes into a log."""
TAIL_LINES = 10


@dataclass(frozen=True)
class Exit:
    """The end of a worker."""

    code: int | None
    """As subprocess has it: -9 for SIGKILL; None if the process could not be ended."""
    time: float
    """When the launcher noticed."""
    ended: bool = False
    """By the launcher, since another rank had failed."""
    stopped: bool = False
    """It had been stopped then, or waited in the kernel."""


def first_failure(
    exits: Mapping[int, Exit], folder: Path, private: Path, host: str
) -> Failure | None:
    """Return the failure of the rank of this node that failed first; None if none failed."""
    errors = {
        rank: error for rank in exits if (error := _read_error(rank_file(private, rank, ERROR)))
    }
    stuck = tuple(rank for rank, exit in exits.items() if exit.stopped)
    failed = [
        rank for rank, exit in exits.items() if rank in errors or (exit.code and not exit.ended)
    ]
    if not failed:
        return None
    # A killed rank writes no file, and sorts before ranks that may only have lost it as a peer.
    rank = min(
        failed,
        key=lambda rank: errors[rank]["extraInfo"].get("time", 0.0) if rank in errors else 0.0,
    )
    if rank not in errors:
        words = f"exited without a traceback ({_describe_exit(exits[rank].code)})"
        text = "\n".join([*_last_lines(rank_log(folder, rank), exits[rank].code), words])
        return Failure(rank, host, exits[rank].time, None, words, text, known=False, stuck=stuck)
    message, details = errors[rank]["message"], errors[rank]["extraInfo"]
    is_user_error = bool(details.get("is_user_error"))
    same = tuple(other for other, error in errors.items() if error["message"] == message)
    codes = {exits[other].code for other in same}  # some may have been ended before they could exit
    return Failure(
        rank,
        host,
        details.get("time", exits[rank].time),
        details.get("step"),
        words=message.partition("\n")[0],
        text=message.partition(": ")[2] if is_user_error else details["py_callstack"].rstrip(),
        code=next((code for code in (REFUSED, GIVEN_UP) if code in codes), FAILED),
        is_user_error=is_user_error,
        told_by=same,
        stuck=stuck,
    )


def _read_error(path: Path) -> dict[str, Any] | None:
    """Return the message of a rank's error file; None if it wrote none, or was killed while it
    did.
    """
    try:
        message = json.loads(path.read_text(encoding="utf-8"))["message"]
        return message if isinstance(message, dict) else None
    except (OSError, ValueError):
        return None


def _last_lines(log: Path, code: int | None) -> list[str]:
    """Return the lines of a log about the end of its rank: the stack of a crash, none of a kill."""
    if code == -signal.SIGKILL or not log.exists():
        return []
    lines = untimed(log.read_text(errors="replace")).splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith(CRASH)]
    return lines[starts[-1] :] if starts else lines[-TAIL_LINES:]


def _describe_exit(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exit code {code}"
    cause = ", by hand or by the kernel when memory ran out" * (code == -signal.SIGKILL)
    return f"{signal.Signals(-code).name}{cause}"
