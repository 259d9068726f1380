"""The messages of the control plane: each launcher posts its Status on the board, and node 0
answers with a Decision.

Under torchrun or srun, without titanlite's launcher, each rank posts its own and rank 0 decides.
Imports no torch.
"""

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
    """Time since the phase began."""
    limit: float
    """Seconds that the phase may take."""
    key: str
    """The config key that sets the limit."""
    pid: int
    host: str
    completed: int = 0
    """The last complete step."""


@dataclass(frozen=True)
class Inspection:
    """A process as seen from outside; empty if that was not possible."""

    state: str = ""
    stack: str = ""
    """The stacks of its threads, as written by faulthandler or py-spy."""


@dataclass(frozen=True)
class Failure:
    """A failure that ended an attempt."""

    rank: int
    """-1 for a launcher."""
    host: str
    time: float
    step: int | None
    """The step that the rank was in; None if unknown."""
    words: str
    """Its message, in one line."""
    text: str
    """What the terminal shows: a message, a traceback, or the end of a log."""
    code: int = FAILED
    known: bool = True
    """Whether the rank gave a reason. One that was killed sorts first, since the others may have
    failed because of it.
    """
    is_user_error: bool = False
    """A mistake that the user can correct and a restart cannot; the text is one message."""
    told_by: tuple[int, ...] = ()
    """The ranks with the same message."""
    stuck: tuple[int, ...] = ()
    """Ranks that had been stopped."""
    saved_step: int = 0
    """Step of the newest checkpoint when the run failed."""

    @property
    def order(self) -> tuple[bool, bool, float]:
        """Return a sort key that puts causes before consequences; a user's mistake comes first."""
        return not self.is_user_error, self.known, self.time

    def repeats(self, earlier: Failure) -> bool:
        """Whether the run failed before at the same step with the same words. Kills do not count,
        since they come from outside.
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
            if saved and self.step:
                lines.append(f"in step {self.step}; {saved}")
            elif saved:
                lines.append(saved)
        if self.stuck:
            lines.append(
                f"rank {', '.join(map(str, self.stuck))} hung or was stopped: it had to be killed"
            )
        return "\n".join([*lines, self.text])


@dataclass(frozen=True)
class Ended:
    """The end of an attempt on one node. Without a failure or early exit, all its ranks reached the
    target step.
    """

    failure: Failure | None = None
    early: EarlyExit | None = None
    over: bool = False
    """Whether the ranks of other nodes cannot continue either."""


@dataclass(frozen=True)
class Status:
    """The status of a launcher, or of a rank under torchrun or srun."""

    incarnation: int = 1
    """How many launchers have been this node."""
    count: int = 0
    """Number of exchanges, which serves as the sign of life."""
    attempt: int = 1
    """The attempt that it takes part in, or wants to."""
    processes: int = 1
    beats: dict[int, Beat] = field(default_factory=dict)
    """The beats of its ranks."""
    stop: str = ""
    """A request to stop, with its reason."""
    ended: Ended | None = None
    found: dict[int, Inspection] | None = None
    """Inspections of its ranks, made because the run hangs."""
    prepared: bool = False
    """Whether the dump folder is ready, for node 0."""
    left: bool = False


@dataclass(frozen=True)
class Verdict:
    """The outcome of an attempt: an exit code, or None for another attempt."""

    code: int | None
    why: str = ""
    """A line for the terminal."""
    failure: Failure | None = None
    early: EarlyExit | None = None
    resumes: bool = False
    """Whether the next attempt starts from a checkpoint of this run."""
    first_step: int = 0
    """The first step of the next attempt."""

    @property
    def cause(self) -> str:
        """Return what ended the attempt, and what follows, in one line."""
        failure = self.failure
        words = ""
        if failure:
            who = ""
            if failure.rank >= 0:
                who = f"rank {failure.rank} on {failure.host}: "
            words = f"{who}{failure.words}"
        return "; ".join(filter(None, [words, self.why]))


@dataclass(frozen=True)
class Decision:
    """What node 0 has decided; everyone follows it."""

    attempt: int = 1
    members: tuple[int, ...] = ()
    """The nodes of the attempt; empty while they gather."""
    prepared: bool = False
    """Whether the dump folder is ready."""
    stop: str = ""
    """Why the run should stop after a save; empty without a request."""
    hangs: bool = False
    """Whether to inspect the ranks."""
    report: str = ""
    """The report of the hang, once the ranks have been inspected."""
    failed: bool = False
    """Whether the attempt has failed somewhere, so that all workers must end."""
    verdict: Verdict | None = None
    """The verdict on this attempt if it is the last, otherwise on the one before."""

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
