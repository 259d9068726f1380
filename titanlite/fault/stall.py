"""Detect a hang from the ranks' heartbeats, and name the likely rank. Uses no store and no process,
and imports no torch.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from titanlite.config.schema import JobConfig
from titanlite.errors import few_of
from titanlite.fault.status import Beat, Inspection, Status

ENDED = "ended"
"""Phase of a rank that has nothing left to do."""
PAUSED = "stopped"
"""State of a process that a signal or a debugger has stopped."""
IN_KERNEL = "waiting for a device (D)"
"""State of a process that takes no signal, such as one whose GPU does not answer."""
SILENT_BEATS = 4
"""Intervals without a beat after which a rank is suspect: its process is gone, or a thread holds
the GIL.
"""
REPORT_SECONDS = 8
"""Time from a hang to its report, even if a node has not inspected its ranks by then."""
MOST_STACKS = 4
MOST_FRAMES = 16
MOST_GROUPS = 8
"""Limits of the short report, which stays short for thousands of ranks."""
_FILE = r"(?:.*/(?:site-packages|lib/python[\d.]+)/)?(?P<file>[^\"]+)"
_FAULTHANDLER = re.compile(rf' +File "{_FILE}", line (?P<line>\d+) in (?P<name>.+)')
_PY_SPY = re.compile(rf" +(?P<name>.+) \({_FILE}:(?P<line>\d+)\)")
_WAITS = re.compile(
    r"torch/(distributed/|cuda/streams\.py)"
    r"|.*titanlite/(train/(guard|report)|parallel/expert_parallel)\.py"
)
"""Files of torch and titanlite that wait for other ranks or for the GPU. (A copy to the host shows
no file.)
"""
_CALLERS = "torch/_ops.py", "torch/_dynamo/", "torch/utils/_contextlib.py"
"""Files of torch that only pass calls on; their callers show what a thread is doing."""


@dataclass(frozen=True)
class Standing:
    """A rank of a hanging run."""

    rank: int
    beat: Beat | None
    age: float
    """Seconds since its last beat, or since the start."""
    inspection: Inspection = Inspection()

    @property
    def state(self) -> str:
        return self.inspection.state

    @property
    def stack(self) -> str:
        return self.inspection.stack

    @property
    def place(self) -> tuple[int, int]:
        if self.beat:
            return self.beat.step, self.beat.sequence
        return -1, -1

    @property
    def where(self) -> str:
        if not self.beat:
            return "before its first heartbeat"
        if self.beat.step:
            return f"{self.beat.phase} of step {self.beat.step}"
        return self.beat.phase


@dataclass(frozen=True)
class Hang:
    """No rank has moved for longer than the slowest phase may take."""

    limit: float
    key: str
    interval: float
    """Seconds within which a rank shows at least one sign of life."""
    ranks: tuple[Standing, ...]


class Judge:
    """Follows the beats of all ranks by its own clock, since theirs may have stopped."""

    def __init__(
        self, world: int, interval: float, start_limit: tuple[float, str], now: float
    ) -> None:
        self._interval = interval
        self._start_limit = start_limit
        self._clock = 0.0
        self._last_look = now
        self._beats: list[Beat | None] = [None] * world
        self._heard = [0.0] * world
        self._moved = [0.0] * world

    def look(self, beats: Mapping[int, Beat], now: float) -> Hang | None:
        """Take the newest beats; return the hang if there is one."""
        # If this process was stopped itself, by Ctrl-Z or with the machine, it saw nothing.
        self._clock += min(now - self._last_look, 5 * self._interval)
        self._last_look = now
        for rank, beat in beats.items():
            before = self._beats[rank]
            if beat == before:
                continue
            if not before or (before.step, before.sequence) != (beat.step, beat.sequence):
                self._moved[rank] = self._clock
            self._beats[rank] = beat
            self._heard[rank] = self._clock
        left = []
        for rank, beat in enumerate(self._beats):
            if not beat or beat.phase != ENDED:
                left.append(rank)
        if not left:
            return None
        # A silent rank may have moved on to a phase with a longer limit since its last heartbeat.
        # A rank that never had one is in no phase that the others could have left before it.
        since = self._clock - SILENT_BEATS * self._interval
        told = [rank for rank in left if self._beats[rank] and self._heard[rank] >= since]
        last = [self._beats[rank] for rank in told or left]
        limit, key = max((beat.limit, beat.key) if beat else self._start_limit for beat in last)
        if self._clock - max(self._moved[rank] for rank in left) < limit:
            return None
        ranks = (
            Standing(rank, self._beats[rank], self._clock - self._heard[rank]) for rank in left
        )
        return Hang(limit, key, self._interval, tuple(ranks))


class Hangs:
    """Watches the ranks of an attempt, and writes the report of a hang once they were inspected."""

    def __init__(
        self, config: JobConfig, attempt: str, world: int, now: float, interval: float = 1.0
    ) -> None:
        """The attempt begins now; ranks show a sign of life in each interval, in seconds."""
        start = config.comm.init_timeout_seconds, "comm.init_timeout_seconds"
        self._judge = Judge(world, interval, start, now)
        self._file = Path(config.job.dump_folder, "logs", f"hang-{attempt}.txt")
        self._traces = Path(config.job.dump_folder, config.comm.save_traces_folder)
        self._hang: Hang | None = None
        self._until = 0.0
        self.report = ""
        """For the terminal; the file has all stacks."""

    @property
    def is_hung(self) -> bool:
        return self._hang is not None

    def look(self, members: Mapping[int, Status], now: float) -> None:
        """Take the newest statuses of the attempt's nodes."""
        if self._hang is None:
            beats = {}
            for status in members.values():
                beats.update(status.beats)
            self._hang = self._judge.look(beats, now)
            self._until = now + REPORT_SECONDS
            return
        found = [status.found for status in members.values()]
        if self.report or (None in found and now < self._until):
            return
        inspected = {}
        for of_node in found:
            if of_node:
                inspected.update(of_node)
        unseen = Inspection()
        ranks = []
        for each in self._hang.ranks:
            ranks.append(replace(each, inspection=inspected.get(each.rank, unseen)))
        hang = replace(self._hang, ranks=tuple(ranks))
        with suppress(OSError):  # the disk may be full; the terminal shows the report anyway
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.write_text(report(hang, whole=True) + "\n", encoding="utf-8")
        self.report = f"{report(hang)}\nall stacks: {self._file}"
        if any(self._traces.glob("rank_*")):
            self.report += f"\ncollectives: titanlite doctor --traces {self._traces}"


def culprits(hang: Hang) -> tuple[list[Standing], str]:
    """Return the ranks that the others wait for, with the evidence; no rank if there is none."""
    ranks = hang.ranks
    least = min(each.place for each in hang.ranks)
    stopped = [each for each in ranks if each.state == PAUSED]
    if stopped:
        return stopped, "stopped"
    held = [each for each in ranks if each.state == IN_KERNEL]
    if held:
        return held, IN_KERNEL
    answered = any(each.stack for each in ranks)
    mute = [each for each in ranks if answered and each.state and not each.stack]
    if mute:
        return mute, "without a stack, which others have"
    silent = [each for each in ranks if each.age > SILENT_BEATS * hang.interval]
    if silent:
        return silent, f"no heartbeat for {min(each.age for each in silent):.0f} s"
    behind = [each for each in ranks if each.place == least]
    elsewhere = [each for each in ranks if each.stack and not in_collective(each.stack)]
    # A pipeline stage that waits for the one before it is not at fault.
    waits = elsewhere and all(each.stack and each not in elsewhere for each in behind)
    if len(behind) < len(ranks) and not waits:
        return behind, "behind the others"
    if len(ranks) > 1 and len(elsewhere) == len(ranks):
        return [], ""
    return elsewhere, "not in a collective, where the others wait"


def report(hang: Hang, whole: bool = False) -> str:
    """Return the report of a hang, the ranks at fault first. Ranks in the same place share a line.

    If `whole`, it has all threads of the ranks at fault, and a stack for each group of others.
    """
    guilty, reason = culprits(hang)
    blamed = "no rank stands out"
    if guilty:
        blamed = f"{_names(guilty)}: {reason}"
    lines = [f"the run hangs: no rank moved for {hang.limit:g} s ({hang.key}). {blamed}"]
    for each in guilty[:MOST_STACKS]:
        stack = _all_threads(each.stack) if whole else main_frames(each.stack)[:MOST_FRAMES]
        stack = stack or ["no stack: the process could not be signaled or did not respond"]
        lines += [_describe(each), *_indented(stack)]
    groups: dict[str, list[Standing]] = {}
    for each in hang.ranks:
        if each not in guilty[:MOST_STACKS]:
            line = each.where + _state_of(each)
            frames = main_frames(each.stack)
            if frames:
                line += f", in {frames[0]}"
            groups.setdefault(line, []).append(each)
    shown = [*groups.items()]
    if not whole:
        shown = shown[:MOST_GROUPS]
    for line, ranks in shown:
        lines.append(f"{_names(ranks)}: {line}")
        if whole:
            lines += _indented(_all_threads(ranks[0].stack))
    if len(shown) < len(groups):
        lines.append(f"and ranks in {len(groups) - len(shown)} more places")
    return "\n".join(lines)


def _describe(each: Standing) -> str:
    state = _state_of(each)
    if not each.beat:
        return f"rank {each.rank}: {each.where}, for {each.age:.0f} s{state}"
    return (
        f"rank {each.rank} on {each.beat.host}: {each.where} "
        f"for {each.beat.seconds + each.age:.0f} s{state}, last beat {each.age:.0f} s ago, "
        f"pid {each.beat.pid}"
    )


def _state_of(each: Standing) -> str:
    return f", {each.state}" if each.state else ""


def _names(ranks: Sequence[Standing]) -> str:
    noun = "rank" if len(ranks) == 1 else "ranks"
    return f"{noun} {few_of([each.rank for each in ranks])}"


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _threads(stack: str) -> dict[str, list[str]]:
    """Return the Python frames of each thread that has any, innermost first, by its header line."""
    parts = iter(re.split(r"^((?:Current thread|Thread) .*)$", stack, flags=re.MULTILINE)[1:])
    threads = {}
    for head, frames in zip(parts, parts, strict=True):
        threads[head] = [*filter(None, map(_frame, frames.splitlines()))]
    return {head: frames for head, frames in threads.items() if frames}


def _frame(line: str) -> str:
    match = _FAULTHANDLER.fullmatch(line) or _PY_SPY.fullmatch(line)
    if match:
        return "{file}:{line} in {name}".format(**match.groupdict())
    return ""


def _all_threads(stack: str) -> list[str]:
    threads = _threads(stack)
    found = list[str]()
    for head, frames in threads.items():
        found.extend((head, *_indented(frames)))
    return found


def main_frames(stack: str) -> list[str]:
    """Return the frames of the main thread, innermost first; faulthandler lists it last."""
    threads = _threads(stack)
    last: list[str] = []
    for head, frames in threads.items():
        if "MainThread" in head:
            return frames
        last = frames
    return last


def in_collective(stack: str) -> bool:
    """Return whether the main thread waits in torch's communication, or for a GPU that may be in
    it.
    """
    inner = next((frame for frame in main_frames(stack) if not frame.startswith(_CALLERS)), "")
    return bool(_WAITS.match(inner))
