"""Which rank of an attempt failed first, and what there is to say about it. No torch."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from titanlite.errors import FAILED, GIVEN_UP, REFUSED
from titanlite.observe.console import rank_log
from titanlite.runtime.rank_files import ERROR, rank_file


@dataclass(frozen=True)
class Exit:
    """How a worker ended."""

    code: int | None
    """As subprocess has it: -9 for SIGKILL; None if the process could not be ended."""
    time: float
    """When the launcher noticed."""
    ended: bool = False
    """By the launcher, since another rank had failed."""
    stopped: bool = False
    """It had been stopped then, or waited in the kernel."""


@dataclass(frozen=True)
class Failure:
    """What ended an attempt. Launchers send it to each other."""

    rank: int
    """-1 for one of a launcher."""
    host: str
    time: float
    step: int | None
    """The step that the rank was in; None if it could not say."""
    words: str
    """What it said, in one line."""
    text: str
    """What is printed: a message, a traceback, or the end of a log."""
    code: int = FAILED
    known: bool = True
    """Whether the rank said why. One that was killed sorts first: the others may only have lost it."""
    is_user_error: bool = False
    """Something that the user can correct, and that would fail again: the text is one message."""
    told_by: tuple[int, ...] = ()
    """The ranks that said the same."""
    stuck: tuple[int, ...] = ()
    """Ranks that had been stopped."""

    @classmethod
    def parse(cls, text: str | bytes) -> Failure:
        values = json.loads(text)
        return cls(**values | {name: tuple(values[name]) for name in ("told_by", "stuck")})

    def render(self) -> str:
        return json.dumps(asdict(self))

    @property
    def order(self) -> tuple[bool, bool, float]:
        """Return a sort key, by which what failed first comes first: a user's mistake is no consequence of others."""
        return not self.is_user_error, self.known, self.time

    def repeats(self, earlier: Failure) -> bool:
        """Whether the run failed before in the same step with the same words. A kill comes from outside."""
        where = self.step, self.words
        return self.step is not None and where == (earlier.step, earlier.words) and "SIGKILL" not in self.words

    def describe(self, log: Path) -> str:
        """Return the lines to print, with the traceback last."""
        if self.rank < 0:
            return f"\ntitanlite: {self.text}"
        title = f"rank {self.rank} on {self.host} failed first"
        if not self.is_user_error:
            title += f"; its log: {log}"
        if self.stuck:
            title += f"\nrank {', '.join(map(str, self.stuck))} hung or was stopped: it had to be killed"
        return f"\ntitanlite: {title}\n{self.text}"


def first_failure(exits: Mapping[int, Exit], folder: Path, private: Path, host: str) -> Failure | None:
    """Return the failure of the rank of this node that failed first; None if none failed."""
    errors = {rank: error for rank in exits if (error := _read_error(rank_file(private, rank, ERROR)))}
    stuck = tuple(rank for rank, exit in exits.items() if exit.stopped)
    failed = [rank for rank, exit in exits.items() if rank in errors or (exit.code and not exit.ended)]
    if not failed:
        return None
    # A killed rank writes no file, and sorts before ranks that may only have lost it as a peer.
    rank = min(failed, key=lambda rank: errors[rank]["extraInfo"].get("time", 0.0) if rank in errors else 0.0)
    if rank not in errors:
        log_tail = rank_log(folder, rank).read_text(errors="replace").splitlines()[-30:]
        words = f"exited without a traceback ({_describe_exit(exits[rank].code)})"
        text = "\n".join([*log_tail, words])
        return Failure(rank, host, exits[rank].time, None, words, text, known=False, stuck=stuck)
    message, details = errors[rank]["message"], errors[rank]["extraInfo"]
    said, is_user_error = message.partition(": ")[2], bool(details.get("is_user_error"))
    same = tuple(other for other, error in errors.items() if error["message"] == message)
    codes = {exits[other].code for other in same}  # some may have been ended before they could exit
    return Failure(
        *(rank, host, details.get("time", exits[rank].time), details.get("step"), message.partition("\n")[0]),
        text=said if is_user_error else details["py_callstack"].rstrip(),
        code=next((code for code in (REFUSED, GIVEN_UP) if code in codes), FAILED),
        is_user_error=is_user_error,
        told_by=same,
        stuck=stuck,
    )


def _read_error(path: Path) -> dict[str, Any] | None:
    """Return the message of a rank's error file; None if it wrote none, or was killed while it did."""
    try:
        message = json.loads(path.read_text(encoding="utf-8"))["message"]
        return message if isinstance(message, dict) else None
    except (OSError, ValueError):
        return None


def _describe_exit(code: int | None) -> str:
    is_signal = code is not None and code < 0
    return f"Signal {-code} ({signal.Signals(-code).name})" if is_signal else f"exit code {code}"
