"""A run as a series of attempts: start this node's workers, and restart them after a failure if
that can help.
"""

from __future__ import annotations

import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from titanlite.checkpoint import status
from titanlite.config.job import Job
from titanlite.config.load import Loaded
from titanlite.config.schema import JobConfig
from titanlite.errors import FAILED, RunFailed, first_line
from titanlite.fault.decide import Saved
from titanlite.fault.status import Decision, Ended, Failure, Verdict
from titanlite.launch.node import Node
from titanlite.launch.stopping import Stopped
from titanlite.launch.terminal import say
from titanlite.observe.console import rank_log
from titanlite.observe.events import record_event
from titanlite.runtime.cluster import read_number
from titanlite.runtime.page import read_page
from titanlite.runtime.rank_files import PAGE, rank_file

KEPT_ATTEMPTS = 3
"""Number of failed attempts whose logs are kept."""


@dataclass(frozen=True)
class Attempt:
    """One start of all workers, as this node sees it."""

    number: int
    ranks: range
    """This node's ranks."""
    world: int
    config: JobConfig
    """As given, except that a later attempt starts from the run's newest checkpoint."""


@contextmanager
def leaving(node: Node) -> Iterator[None]:
    """Tell the other nodes about an error that ends this launcher, so that they do not wait."""
    try:
        yield
    except RunFailed:  # the other launchers know, or cannot be reached
        raise
    except Stopped as stopped:
        node.leave(Ended(early=stopped.early, over=True))
        raise
    except BaseException as error:  # a signal, a full disk
        host = socket.gethostname()
        number = getattr(error, "number", 0)
        if isinstance(error, KeyboardInterrupt):
            number = signal.SIGINT
        if number:
            cause = signal.Signals(number).name
            code = 128 + number
        else:
            cause = first_line(error)
            code = getattr(error, "code", FAILED)
        words = f"the launcher on {host} has ended: {cause}"
        failure = Failure(-1, host, time.time(), None, words, words, code, is_user_error=True)
        node.leave(Ended(failure, over=True))
        raise


class Attempts:
    """The attempts of a run on this node."""

    def __init__(
        self,
        node: Node,
        given: JobConfig,
        private: Path,
        work: Callable[[Attempt, Callable[[], None]], Ended],
        saves: bool = True,
    ) -> None:
        """`work` runs the workers of an attempt, with their files in `private`, and keeps calling
        the function that it receives.

        Without `saves`, failure reports do not name the newest save, and no events are recorded.
        """
        self._node = node
        self._given = given
        self._private = private
        self._work = work
        self._saves = saves
        self._folder = Path(given.job.dump_folder)
        self._last: Verdict | None = None
        """The failure before the current attempt, until that attempt's first step is done."""

    def run(self, decision: Decision) -> Verdict:
        """Run attempts, starting with the one decided on, until one succeeds or another is
        pointless; return the verdict.
        """
        while not decision.is_final:
            attempt = self._begin(decision)
            self._record("start", attempt=attempt.number)
            verdict = self._node.settle(self._work(attempt, self._poll))
            self._say_first_step(reached=verdict.code == 0)
            if verdict.code is not None:
                self._report(verdict, self._folder / "logs", attempt.ranks)
                return verdict
            self._report(verdict, _keep_logs(self._folder, attempt), attempt.ranks)
            self._record("restart", why=verdict.cause)
            for path in self._private.iterdir():
                path.unlink()
            decision = self._node.meet()
            self._last = verdict if self._node.rank == 0 else None
        assert decision.verdict
        self._report(decision.verdict, self._folder / "logs")
        return decision.verdict

    def _begin(self, decision: Decision) -> Attempt:
        processes = self._node.processes
        members = decision.members
        first = members.index(self._node.rank) * processes
        config = self._given
        if decision.verdict and decision.verdict.resumes:
            saving = config.checkpoint.model_copy(
                update={"load_step": -1, "exclude_from_loading": []}
            )
            config = config.model_copy(update={"checkpoint": saving})
        return Attempt(
            self._node.attempt, range(first, first + processes), len(members) * processes, config
        )

    def _report(self, verdict: Verdict, logs: Path, own: range = range(0)) -> None:
        """Print the first failure, the newest save and the next attempt. Nodes other than node 0
        print only a failure of their `own` ranks, and one line about anything else that ended the
        run.
        """
        failure = verdict.failure
        if self._node.rank > 0 and (failure is None or failure.rank not in own):
            if verdict.code and not verdict.early:
                say(f"titanlite: node 0 has ended the run: {verdict.cause}", sys.stderr)
            return
        if failure:
            saved = ""
            if self._saves and verdict.code is not None:
                saved = status.last_saved_message(self._given)
            say(failure.describe(logs / f"rank-{failure.rank}.log", saved), sys.stderr)
        if verdict.why and self._node.rank == 0:
            say(f"titanlite: {verdict.why}", sys.stderr)

    def _record(self, event: str, **values: object) -> None:
        if self._node.rank == 0 and self._saves:
            record_event(self._folder, event, **values)

    def _poll(self) -> None:
        self._node.poll()
        self._say_first_step()

    def _say_first_step(self, reached: bool = False) -> None:
        """On node 0, report the first step after a restart."""
        if self._last is None or self._last.failure is None:
            return
        step = self._last.first_step
        failed_at = self._last.failure.time
        page = read_page(rank_file(self._private, 0, PAGE))
        if reached or (page and page.completed >= step):
            self._last = None
            say(
                f"titanlite: step {step} is done, {time.time() - failed_at:.0f} s after the failure"
            )


def saved_since(config: JobConfig) -> Callable[[], Saved]:
    """Return a function that returns the newest checkpoint, and whether this run wrote it."""
    before = status.times(config)

    def saved() -> Saved:
        newest = status.newest_step(config)
        if newest is None:
            return Saved()
        is_new = any(at for _, at in status.times(config).items() - before.items())
        return Saved(newest, f"from {status.name_of(config, newest)}", is_new)

    return saved


def shown_here(shown: set[int], attempt: Attempt) -> list[int]:
    """Return the ranks of this node whose output is shown: those in LOG_RANK, or rank 0 if a
    smaller restart has none of them.
    """
    left = {rank for rank in shown if rank < attempt.world} or {0}
    return sorted(left & {*attempt.ranks})


def max_restarts(loaded: Loaded, job: Job, environ: Mapping[str, str]) -> int:
    """Return how often the run may restart: fault.max_restarts if set, otherwise MAX_RESTARTS."""
    given = read_number(environ, "MAX_RESTARTS", job.config.fault.max_restarts)
    if not job.config.checkpoint.enable:
        return 0
    if "fault.max_restarts" in loaded.entries:
        return job.config.fault.max_restarts
    return given


def _keep_logs(folder: Path, attempt: Attempt) -> Path:
    """Move an attempt's logs out of the way of the next attempt; return their new folder.

    Node 0 moves the logs of all nodes, since another node's launcher may be lost. Once it has, the
    others move nothing: new logs may belong to the next attempt. Only the last attempts are kept,
    since a run of weeks has many, each with a log per rank.
    """
    kept = folder / "logs" / f"attempt-{attempt.number}"
    kept.mkdir(exist_ok=True)
    if 0 in attempt.ranks:
        old = kept.with_name(f"attempt-{attempt.number - KEPT_ATTEMPTS}")
        shutil.rmtree(old, ignore_errors=True)
        ranks = range(attempt.world)
    else:
        ranks = attempt.ranks
    for rank in ranks:
        log = rank_log(folder, rank)
        if 0 in attempt.ranks or not (kept / log.name).exists():
            with suppress(FileNotFoundError):
                log.rename(kept / log.name)
    return kept
