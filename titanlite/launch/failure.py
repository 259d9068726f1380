"""Find the rank of this node that failed first, and its message. Imports no torch."""

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
"""First words of the stack that faulthandler writes to a log."""
TAIL_LINES = 10


@dataclass(frozen=True)
class Exit:
    """The end of a worker."""

    code: int | None
    """As in subprocess: -9 for SIGKILL; None if the process could not be killed."""
    time: float
    """When the launcher noticed."""
    ended: bool = False
    """Whether the launcher ended it because another rank had failed."""
    stopped: bool = False
    """Whether it was stopped at that moment, or stuck in the kernel."""


def first_failure(
    exits: Mapping[int, Exit], folder: Path, private: Path, host: str
) -> Failure | None:
    """Return the failure of the rank of this node that failed first; None if none failed."""
    errors = dict[int, dict[str, Any]]()
    failed_at = dict[int, float]()
    for rank, exit in exits.items():
        error = _read_error(rank_file(private, rank, ERROR))
        if error:
            errors[rank] = error
            failed_at[rank] = error["extraInfo"].get("time", 0.0)
        elif exit.code and not exit.ended:
            # A killed rank writes no file; it comes before ranks that may only have lost a peer.
            failed_at[rank] = 0.0
    stuck = tuple(rank for rank, exit in exits.items() if exit.stopped)
    if not failed_at:
        return None
    rank = min(failed_at, key=failed_at.__getitem__)
    if rank not in errors:
        words = f"exited without a traceback ({_describe_exit(exits[rank].code)})"
        text = "\n".join([*_last_lines(rank_log(folder, rank), exits[rank].code), words])
        return Failure(rank, host, exits[rank].time, None, words, text, known=False, stuck=stuck)
    message = errors[rank]["message"]
    details = errors[rank]["extraInfo"]
    is_user_error = bool(details.get("is_user_error"))
    same = tuple(other for other, error in errors.items() if error["message"] == message)
    text = message.partition(": ")[2]
    if not is_user_error:
        text = details["py_callstack"].rstrip()
    codes = {exits[other].code for other in same}  # some may have been killed before they exited
    return Failure(
        rank,
        host,
        details.get("time", exits[rank].time),
        details.get("step"),
        words=message.partition("\n")[0],
        text=text,
        code=next((code for code in (REFUSED, GIVEN_UP) if code in codes), FAILED),
        is_user_error=is_user_error,
        told_by=same,
        stuck=stuck,
    )


def _read_error(path: Path) -> dict[str, Any] | None:
    """Return the message in a rank's error file, or None if it wrote none or only a part."""
    try:
        message = json.loads(path.read_text(encoding="utf-8"))["message"]
        return message if isinstance(message, dict) else None
    except (OSError, ValueError):
        return None


def _last_lines(log: Path, code: int | None) -> list[str]:
    """Return the lines of a log that show how its rank ended: the stack of a crash, or the last
    lines; none for a killed rank.
    """
    if code == -signal.SIGKILL or not log.exists():
        return []
    lines = untimed(log.read_text(errors="replace")).splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith(CRASH)]
    if starts:
        return lines[starts[-1] :]
    return lines[-TAIL_LINES:]


def _describe_exit(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exit code {code}"
    cause = signal.Signals(-code).name
    if code == -signal.SIGKILL:
        cause += ", by hand or by the kernel when memory ran out"
    return cause
