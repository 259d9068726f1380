"""A run as a series of attempts: whether one that failed is followed by another, and from which checkpoint."""

from __future__ import annotations

import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from titanlite.checkpoint.manifest import committed, latest_complete, step_folder
from titanlite.checkpoint.resume import checkpoint_root
from titanlite.config.schema import JobConfig
from titanlite.errors import CUT_SHORT, FAILED, GIVEN_UP, OK, STOPPED, RunFailed, first_line
from titanlite.fault.stall import Stalled
from titanlite.launch.failure import Exit, Failure, first_failure
from titanlite.launch.rendezvous import NodeRendezvous, PeerFailed, Verdict
from titanlite.launch.stopping import last_completed
from titanlite.launch.terminal import say
from titanlite.observe.console import rank_log
from titanlite.runtime.page import EarlyExit
from titanlite.train.ending import describe_stop


@dataclass(frozen=True)
class Attempt:
    """One start of all workers, as this node sees it."""

    number: int
    ranks: range
    """Of this node."""
    world: int
    config: JobConfig
    """As given; a later attempt starts from the newest checkpoint of the run."""


LOOK_SECONDS = 0.5
Work = Callable[[Attempt], tuple[dict[int, Exit], RunFailed | None]]


def judge(failure: Failure, earlier: Sequence[Failure], max_restarts: int) -> Verdict:
    """Decide what follows a failure: not what failed the same way before, or would."""
    if failure.is_user_error or not max_restarts:
        return Verdict(failure.code)
    if any(failure.repeats(other) for other in earlier):
        return Verdict(FAILED, f"not restarted: step {failure.step} failed before, with the same words")
    if len(earlier) >= max_restarts:
        return Verdict(GIVEN_UP, f"given up: fault.max_restarts = {max_restarts}")
    return Verdict(None)


class Attempts:
    """The attempts of a run, as this node's launcher sees them; on node 0 it decides about them."""

    def __init__(
        self,
        work: Work,
        given: JobConfig,
        rendezvous: NodeRendezvous,
        private: Path,
        processes: int,
        max_restarts: int,
    ) -> None:
        """`work` runs an attempt's workers of this node, which leave what their launcher should know in `private`."""
        self._work, self._given, self._rendezvous, self._private = work, given, rendezvous, private
        self._processes, self._folder, self._max_restarts = processes, Path(given.job.dump_folder), max_restarts
        self._saved_before = _saved(given)
        self._failures: list[Failure] = []
        """Of all attempts so far; on node 0."""
        self._first_step, self._looked_at = 0, 0.0

    def run(self, members: list[int], fits: Callable[[int], str], asked: Callable[[], str], shown: set[int]) -> int:
        """Run attempts until one succeeds, or another is not worth a try; return the exit code.

        `members` are the nodes of the first, `fits` says what a number of ranks lacks, `asked` why the run should
        stop, if it should, and `shown` are the ranks on the terminal.
        """
        try:
            return self._run(members, fits, asked, shown)
        except RunFailed:  # of which the other launchers know, or which they cannot be told
            raise
        except BaseException as error:  # a signal, a full disk: the others should not wait for this launcher
            host = socket.gethostname()
            number = getattr(error, "number", signal.SIGINT if isinstance(error, KeyboardInterrupt) else 0)
            cause = signal.Signals(number).name if number else first_line(error)
            words = f"the launcher on {host} has ended: {cause}"
            code = 128 + number if number else getattr(error, "code", FAILED)
            self._rendezvous.leave(Failure(-1, host, time.time(), None, words, words, code, is_user_error=True))
            raise

    def _run(self, members: list[int], fits: Callable[[int], str], asked: Callable[[], str], shown: set[int]) -> int:
        resumes = False
        while True:
            attempt = self._begin(members, resumes)
            own, over = self._failure_here(attempt)
            decide = partial(self._decide, attempt, asked)
            verdict = self._rendezvous.settle(own, over, decide)
            failure = Failure.parse(verdict.failure) if verdict.failure else None
            logs = self._folder / "logs" if verdict.code is not None else _keep_logs(self._folder, attempt)
            if failure and not (failure.is_user_error and shown & set(failure.told_by)):
                print(failure.describe(logs / f"rank-{failure.rank}.log"), file=sys.stderr)
            if verdict.why:
                print(f"titanlite: {verdict.why}", file=sys.stderr, flush=True)
            if self._look_for_step in self._rendezvous.on_poll:
                if verdict.code == OK and self._first_step <= self._given.training.steps:
                    self._tell_first_step()
                else:
                    self._rendezvous.on_poll.remove(self._look_for_step)
            if verdict.code is not None:
                return verdict.code
            for path in self._private.iterdir():
                path.unlink()
            members, resumes = self._rendezvous.call_roll(fits), verdict.resumes
            if self._failures:
                self._rendezvous.on_poll.append(self._look_for_step)

    def _begin(self, members: list[int], resumes: bool) -> Attempt:
        first = members.index(self._rendezvous.rank) * self._processes
        ranks, config = range(first, first + self._processes), self._given
        if resumes:
            saving = config.checkpoint.model_copy(update={"load_step": -1, "exclude_from_loading": []})
            config = config.model_copy(update={"checkpoint": saving})
        return Attempt(self._rendezvous.attempt, ranks, len(members) * self._processes, config)

    def _failure_here(self, attempt: Attempt) -> tuple[Failure | None, bool]:
        """Run an attempt; return the failure of this node and whether the attempt is over on all others too."""
        host = socket.gethostname()
        exits, reason = self._work(attempt)
        if isinstance(reason, Stalled):
            return Failure(-1, host, reason.time, None, first_line(reason), str(reason), known=False), True
        if reason and not isinstance(reason, PeerFailed):
            return Failure(-1, host, time.time(), None, first_line(reason), str(reason)), True
        return first_failure(exits, self._folder, self._private, host), bool(reason)

    # ---------------------------------------------------------------- on node 0

    def _decide(self, attempt: Attempt, asked: Callable[[], str], failures: list[Failure]) -> Verdict:
        """Return what follows an attempt with these failures on its nodes."""
        if not failures:
            return Verdict(OK)
        failure = min(failures, key=lambda failure: failure.order)
        beats = self._rendezvous.beats(attempt.number, range(attempt.world))
        if failure.step is None and failure.rank in beats:
            failure = replace(failure, step=beats[failure.rank].step)
        verdict = replace(judge(failure, self._failures, self._max_restarts), failure=failure.render())
        self._failures.append(failure)
        if verdict.code is not None:
            return verdict
        told = [beat.completed for beat in beats.values()]
        completed = max([last_completed(self._private), (failure.step or 1) - 1, *told])
        saved, source = _newest(attempt.config)
        self._first_step, lost = saved + 1, max(0, completed - saved)
        if reason := asked():
            left = EarlyExit(CUT_SHORT if lost else STOPPED, saved + lost, reason, lost)
            return replace(verdict, code=left.code, why=describe_stop(self._given, left))
        number = f"restart {len(self._failures)} of {self._max_restarts}"
        why = f"{number}, {source}; {lost} step{'s' * (lost != 1)} lost"
        return replace(verdict, why=why, resumes=bool(_saved(attempt.config).items() - self._saved_before.items()))

    def _look_for_step(self) -> None:
        """Say on node 0 when the attempt has taken its first step."""
        if time.monotonic() < self._looked_at + LOOK_SECONDS:
            return
        self._looked_at, rendezvous = time.monotonic(), self._rendezvous
        beat = rendezvous.beats(rendezvous.attempt, [0]).get(0)
        if beat and beat.step > self._first_step:
            self._tell_first_step()

    def _tell_first_step(self) -> None:
        self._rendezvous.on_poll.remove(self._look_for_step)
        seconds = time.time() - self._failures[-1].time
        say(f"titanlite: step {self._first_step} is done, {seconds:.0f} s after the failure")


def _newest(config: JobConfig) -> tuple[int, str]:
    """Return the step from which a run goes on, and how to say it."""
    root = checkpoint_root(config)
    newest = latest_complete(root)
    if newest is None:
        return 0, "from the start: nothing was saved yet"
    return newest, f"from {step_folder(root, newest)}"


def _saved(config: JobConfig) -> dict[int, int]:
    """Return the steps of the checkpoints there are, and when each was committed."""
    root = checkpoint_root(config)
    return {step: step_folder(root, step).stat().st_mtime_ns for step in committed(root)}


def _keep_logs(folder: Path, attempt: Attempt) -> Path:
    """Move this node's logs of an attempt out of the way of the next one's; return where they are.

    Node 0 moves all: the launcher of another node may be lost.
    """
    kept = folder / "logs" / f"attempt-{attempt.number}"
    kept.mkdir(exist_ok=True)
    for rank in range(attempt.world) if 0 in attempt.ranks else attempt.ranks:
        log = rank_log(folder, rank)
        with suppress(FileNotFoundError):
            log.rename(kept / log.name)
    return kept
