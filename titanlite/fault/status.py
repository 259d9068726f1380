"""The values of the control plane: each launcher puts its Status on the board, node 0 answers with
a Decision.

Below torchrun or srun, without titanlite's launcher, each rank does so for itself and rank 0
decides. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from titanlite.errors import FAILED
from titanlite.runtime.page import EarlyExit

T = TypeVar("T")


@dataclass(frozen=True)
class Beat:
    """A rank's place at its last heartbeat."""

    step: int
    phase: str
    sequence: int
    seconds: float
    """Since the phase began."""
    limit: float
    """Seconds that the phase may take."""
    key: str
    """The key of the config that sets the limit."""
    pid: int
    host: str
    completed: int = 0
    """The last complete step."""


@dataclass(frozen=True)
class Inspection:
    """A process as seen from outside; empty where that was not possible."""

    state: str = ""
    stack: str = ""
    """Of its threads, as faulthandler or py-spy writes it."""


@dataclass(frozen=True)
class Failure:
    """The end of an attempt."""

    rank: int
    """-1 for one of a launcher."""
    host: str
    time: float
    step: int | None
    """The step that the rank was in; None if unknown."""
    words: str
    """Its message, in one line."""
    text: str
    """For the terminal: a message, a traceback, or the end of a log."""
    code: int = FAILED
    known: bool = True
    """Whether the rank gave a reason. A killed one sorts first: the others may only have lost
    it.
    """
    is_user_error: bool = False
    """A mistake that the user can correct, and that would fail again: the text is one message."""
    told_by: tuple[int, ...] = ()
    """The ranks with the same message."""
    stuck: tuple[int, ...] = ()
    """Ranks that had been stopped."""
    saved_step: int = 0
    """The newest checkpoint's when the run failed."""

    @property
    def order(self) -> tuple[bool, bool, float]:
        """Return a sort key that puts causes before consequences: a user's mistake has no cause in
        other ranks.
        """
        return not self.is_user_error, self.known, self.time

    def repeats(self, earlier: Failure) -> bool:
        """Whether the run failed before in the same step with the same words. A kill comes from
        outside.
        """
        where = self.step, self.words
        return (
            self.step is not None
            and where == (earlier.step, earlier.words)
            and "SIGKILL" not in self.words
        )

    def describe(self, log: Path, saved: str = "") -> str:
        """Return the lines to print, with the traceback last; `saved` is a phrase about the newest
        save.
        """
        if self.rank < 0 or (self.is_user_error and 0 in self.told_by):
            return f"\ntitanlite: {self.text}"
        lines = [f"\ntitanlite: rank {self.rank} on {self.host} failed first"]
        if not self.is_user_error:
            lines[0] += f"; its log: {log}"
            lines += [f"in step {self.step}; {saved}" if self.step else saved] if saved else []
        if self.stuck:
            lines.append(
                f"rank {', '.join(map(str, self.stuck))} hung or was stopped: it had to be killed"
            )
        return "\n".join([*lines, self.text])


@dataclass(frozen=True)
class Ended:
    """The end of an attempt on one node; without failure and early exit all its ranks reached the
    target step.
    """

    failure: Failure | None = None
    early: EarlyExit | None = None
    over: bool = False
    """Whether other nodes' ranks cannot go on."""


@dataclass(frozen=True)
class Status:
    """A launcher, or a rank below torchrun or srun."""

    incarnation: int = 1
    """The number of launchers that have been this node."""
    count: int = 0
    """Of the exchanges: the sign of life."""
    attempt: int = 1
    """The attempt that it takes part in, or would like to."""
    processes: int = 1
    beats: dict[int, Beat] = field(default_factory=dict)
    """Of its ranks."""
    stop: str = ""
    """A request to stop, with its reason."""
    ended: Ended | None = None
    found: dict[int, Inspection] | None = None
    """Its ranks, inspected because the run hangs."""
    prepared: bool = False
    """Node 0's, whether the dump folder is ready."""
    left: bool = False


@dataclass(frozen=True)
class Verdict:
    """The outcome of an attempt: an exit code, or another attempt (None)."""

    code: int | None
    why: str = ""
    """A line for the terminal."""
    failure: Failure | None = None
    early: EarlyExit | None = None
    resumes: bool = False
    """The next attempt starts from a checkpoint of this run, whatever the first one started
    from.
    """
    first_step: int = 0
    """The first step of the next attempt."""

    @property
    def cause(self) -> str:
        """Return what ended the attempt, and what follows, in one line."""
        failure, words = self.failure, ""
        if failure:
            who = f"rank {failure.rank} on {failure.host}: " if failure.rank >= 0 else ""
            words = f"{who}{failure.words}"
        return "; ".join(filter(None, [words, self.why]))


@dataclass(frozen=True)
class Decision:
    """Node 0's word on the run; everyone obeys."""

    attempt: int = 1
    members: tuple[int, ...] = ()
    """The nodes that take part; none while they gather."""
    prepared: bool = False
    """Whether the dump folder is ready."""
    stop: str = ""
    """Why the run should stop after a save; empty without a request."""
    hangs: bool = False
    """Whether to inspect the ranks."""
    report: str = ""
    """On the hang, once the ranks were inspected."""
    failed: bool = False
    """Whether the attempt has failed somewhere: end its workers."""
    verdict: Verdict | None = None
    """On this attempt if it is the last one, otherwise on the one before."""

    @property
    def is_final(self) -> bool:
        return self.verdict is not None and self.verdict.code is not None


@cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def dump(value: Status | Decision) -> str:
    return _adapter(type(value)).dump_json(value).decode()


def parse(kind: type[T], text: bytes) -> T:
    return _adapter(kind).validate_json(text)
