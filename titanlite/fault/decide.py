"""Decide for all nodes: who takes part, whether the run hangs, the first failure, and the next
attempt.

A pure function of the nodes' statuses, their history and a clock; two callbacks provide facts about
the disk and the config."""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from titanlite.config.schema import JobConfig
from titanlite.errors import CUT_SHORT, FAILED, GIVEN_UP, OK, REFUSED, STOPPED, few_of
from titanlite.fault.stall import Hangs
from titanlite.fault.status import Beat, Decision, Ended, Failure, Status, Verdict
from titanlite.runtime.page import EarlyExit

SILENCE_SECONDS = 15.0
"""A node is lost if its launcher has shown no sign of life for this long."""
TAKEOVER_SECONDS = 3.0
"""Another launcher may replace one that has shown no sign of life for this long."""
VERDICT_SECONDS = 5.0
"""Time from the first failure to the verdict: another node may have failed earlier."""
DAY_SECONDS = 86400
MOST_A_DAY = 24
"""Restarts within a day: a run that needs more has a fault that someone should look at."""


@dataclass(frozen=True)
class Saved:
    """The newest checkpoint on disk."""

    step: int = 0
    source: str = "from the start: nothing was saved yet"
    by_this_run: bool = False


@dataclass(frozen=True)
class Restarts:
    """Whether a run may continue after a failure."""

    most: int = 0
    fits: Callable[[int], str] = lambda world: ""
    """Returns why a number of ranks does not fit the job, or an empty string."""
    saved: Callable[[], Saved] = Saved


class Decider:
    """Node 0's judgment."""

    def __init__(
        self, config: JobConfig, nodes: int, now: float, restarts: Restarts, spare: int = 0
    ) -> None:
        """`spare` of the nodes wait until others are lost."""
        self._config = config
        self._nodes = nodes
        self._restarts = restarts
        self._needed = nodes - spare
        self._completed = 0
        """The last complete step of the failed attempt."""
        self.decision = Decision()
        self._deadline = now + config.comm.init_timeout_seconds
        self._moved: dict[int, tuple[tuple[int, int], float]] = {}
        self.waits_for = ""
        """The nodes that the next attempt waits for, and for how long; empty during an attempt."""
        self.silent: dict[int, float] = {}
        """Seconds since each node's last sign of life."""
        self._begun: dict[int, int] = {}
        """The members' incarnations at the start of the attempt."""
        self._judge: Hangs | None = None
        self._failed_at: float | None = None
        self._failures: list[Failure] = []
        """One for each attempt so far."""
        self._failed_on: Counter[int] = Counter()
        """How often a node's rank was the first to fail."""

    def look(self, statuses: Mapping[int, Status], now: float) -> Decision:
        """Return the decision for these statuses; nodes that never came have none."""
        self._follow(statuses, now)
        self.waits_for = ""
        if self.decision.is_final:
            return self.decision
        stop = next((status.stop for status in statuses.values() if status.stop), "")
        own = statuses[0]
        self.decision = replace(
            self.decision, stop=self.decision.stop or stop, prepared=own.prepared
        )
        if own.left:
            self._end_with_node_0(own.ended or Ended())
        elif self.decision.members:
            self._follow_attempt(statuses, now)
        elif not self._ends_before(statuses):
            self._call_roll(statuses, now)
        return self.decision

    def _end(self, code: int, why: str) -> None:
        self.decision = replace(self.decision, failed=True, verdict=Verdict(code, why))

    def _end_with_node_0(self, ended: Ended) -> None:
        if ended.early:
            self.decision = replace(
                self.decision, failed=True, verdict=Verdict(ended.early.code, early=ended.early)
            )
        elif ended.failure:
            self._end(ended.failure.code, f"node 0: {ended.failure.words}")
        else:
            self._end(FAILED, "node 0: its launcher has left")

    def _follow(self, statuses: Mapping[int, Status], now: float) -> None:
        for node, status in statuses.items():
            life = status.incarnation, status.count
            last, since = self._moved.get(node, (None, now))
            if life != last:
                since = now
            self._moved[node] = life, since
            self.silent[node] = now - since

    # ---------------------------------------------------------------- before an attempt

    def _ends_before(self, statuses: Mapping[int, Status]) -> bool:
        """End the run if a launcher has left with a reason, or a stop was requested."""
        stop = self.decision.stop
        for node, status in statuses.items():
            if not status.left or not status.ended or self.silent[node] > SILENCE_SECONDS:
                continue
            failure = status.ended.failure
            if status.ended.early:
                stop = stop or status.ended.early.reason
            elif failure:
                self._end(failure.code, failure.words)
                return True
        if stop:  # no rank is running that could save
            verdict = stopped(self._restarts.saved(), self._completed, stop)
            self.decision = replace(self.decision, verdict=verdict)
        return bool(stop)

    def _call_roll(self, statuses: Mapping[int, Status], now: float) -> None:
        """Begin the attempt once enough nodes are present; after the first attempt, with those that
        arrive in time.
        """
        number = self.decision.attempt
        fault = self._config.fault
        here = self._present(statuses)
        if 0 not in here:  # the time for the others starts when node 0 is ready
            self._deadline = now + fault.rejoin_seconds
        by_fitness = sorted(here, key=lambda node: self._failed_on[node] > 1)
        fit = [node for node in here if self._failed_on[node] < 2]
        may_come = len(fit) < self._needed and len(here) < self._nodes
        seconds = fault.rejoin_seconds
        key = "fault.rejoin_seconds"
        if number == 1:
            seconds = self._config.comm.init_timeout_seconds
            key = "comm.init_timeout_seconds"
        absent = [node for node in range(self._nodes) if node not in here]
        missing = f"NODE_RANK {few_of(absent)}"
        if (0 not in here or may_come) and now <= self._deadline:
            self.waits_for = f"{missing}, at most {seconds} s ({key})"
            return None
        if len({*here.values()}) > 1:
            listed = ", ".join(f"node {node}: {processes}" for node, processes in here.items())
            why = (
                f"the nodes have different numbers of processes ({listed}): "
                "set NGPU to the same on all"
            )
            return self._end(REFUSED, why)
        least = self._needed if number == 1 else fault.min_nodes or self._needed
        if len(here) < least:
            why = (
                f"only {len(here)} of {self._needed} nodes connected within {seconds} s ({key}); "
                f"missing: {missing}"
            )
            if number > 1 and 0 in here and not self._restarts.fits(sum(here.values())):
                why += f"; with fault.min_nodes = {len(here)} the run would have continued"
            # Code 76 requests a new start, which may find other nodes.
            return self._end(CUT_SHORT, why)
        members = tuple(sorted(by_fitness[: self._needed]))
        world = sum(here[node] for node in members)
        if len(members) < self._needed:
            why = self._restarts.fits(world)
            if why:
                return self._end(CUT_SHORT, f"without {missing}: {why}")
        self._begun = {node: statuses[node].incarnation for node in members}
        self._judge = Hangs(self._config, str(number), world, now)
        self.decision = replace(self.decision, members=members)
        return None

    def _present(self, statuses: Mapping[int, Status]) -> dict[int, int]:
        """Return the process counts of the nodes that are ready for the next attempt."""
        here = {}
        for node, status in sorted(statuses.items()):
            if (
                status.attempt == self.decision.attempt
                and not status.left
                and self.silent[node] <= SILENCE_SECONDS
            ):
                here[node] = status.processes
        alike = {}
        for node, count in here.items():
            if count == statuses[0].processes:
                alike[node] = count
        return alike if len(alike) >= self._needed else here

    # ---------------------------------------------------------------- while it runs

    def _follow_attempt(self, statuses: Mapping[int, Status], now: float) -> None:
        assert self._judge
        members = {node: statuses[node] for node in self.decision.members}
        if self._failed_at is None:
            self._judge.look(members, now)
            self.decision = replace(
                self.decision, hangs=self._judge.is_hung, report=self._judge.report
            )
        if self._judge.is_hung and not self._judge.report:
            return  # ranks may die while their stacks are being read
        replaced = []
        for node, status in members.items():
            if status.incarnation != self._begun[node]:
                replaced.append(node)
        ended = {}
        for node, status in members.items():
            if status.ended and status.attempt == self.decision.attempt and node not in replaced:
                ended[node] = status.ended
        rest = [node for node in members if node not in ended and node not in replaced]
        lost = [node for node in rest if self.silent[node] > SILENCE_SECONDS]
        accounted = {*replaced, *lost, *ended}
        fails = (
            replaced
            or lost
            or self._judge.report
            or any(each.over or each.failure for each in ended.values())
        )
        if fails and self._failed_at is None:
            self._failed_at = now
            self.decision = replace(self.decision, failed=True)
        late = self._failed_at is not None and now > self._failed_at + VERDICT_SECONDS
        if accounted != {*members} and not late:
            return
        failures = [each.failure for each in ended.values() if each.failure]
        for node in replaced:
            words = f"the launcher of NODE_RANK={node} ended, and another has taken its place"
            failures.append(_of_launcher(words, 0))
        for node in rest:
            if self.silent[node] > TAKEOVER_SECONDS:
                words = f"the launcher of NODE_RANK={node} does not answer"
                failures.append(_of_launcher(words, self.silent[node]))
        if self._judge.report:
            failures = [
                replace(
                    _of_launcher(self._judge.report, 0), words=self._judge.report.partition("\n")[0]
                )
            ]
        self._settle(self._verdict([*ended.values()], failures, statuses), now)

    def _verdict(
        self, ended: Sequence[Ended], failures: list[Failure], statuses: Mapping[int, Status]
    ) -> Verdict:
        early = min(
            (each.early for each in ended if each.early), key=lambda each: each.order, default=None
        )
        if early:  # one rank that saved its last step is enough; no other has taken a later one
            return Verdict(early.code, early=early)
        if not failures and self._failed_at is None:
            return Verdict(OK)
        failure = min(failures, key=lambda each: each.order, default=None)
        failure = failure or _of_launcher("the launchers lost contact with each other", 0)
        beats = dict[int, Beat]()
        for member in self._begun:
            beats.update(statuses[member].beats)
        if failure.step is None and failure.rank in beats:
            failure = replace(failure, step=beats[failure.rank].step)
        self._completed = max(
            [(failure.step or 1) - 1, *(beat.completed for beat in beats.values())]
        )
        node = 0
        if failure.rank >= 0:  # it may have failed before its first heartbeat
            node = self.decision.members[failure.rank // statuses[0].processes]
        here = []
        for n in statuses:
            if not statuses[n].left and self.silent[n] <= SILENCE_SECONDS:
                here.append(n)
        spare_waits = bool(node) and len(here) > self._needed
        earlier = self._failures[:]
        saved = self._restarts.saved()
        self._failures.append(replace(failure, saved_step=saved.step))
        most = self._restarts.most
        stop = self.decision.stop
        verdict = after(failure, earlier, most, saved, self._completed, stop, spare_waits)
        if not node or verdict.code is not None:  # node 0 hosts the store and stays
            return verdict
        self._failed_on[node] += 1
        if self._failed_on[node] < 2 or self._needed == self._nodes:
            return verdict
        left = f"NODE_RANK {node} failed twice: a spare node takes its place if there is one"
        return replace(verdict, why=f"{verdict.why}; {left}")

    def _settle(self, verdict: Verdict, now: float) -> None:
        if verdict.code is not None:
            self.decision = replace(self.decision, verdict=verdict)
            return
        before = self.decision
        self.decision = Decision(
            before.attempt + 1, prepared=True, stop=before.stop, verdict=verdict
        )
        self._deadline = now + self._config.fault.rejoin_seconds
        self._failed_at = None


def after(
    failure: Failure,
    earlier: Sequence[Failure],
    max_restarts: int,
    saved: Saved,
    completed: int,
    stop: str = "",
    spare_waits: bool = False,
) -> Verdict:
    """Return the decision after a failure: another attempt, unless the run has failed the same way
    before or is certain to do so again.

    If a spare can replace the failed host, that host's earlier failures do not count.
    """
    if failure.is_user_error:
        return Verdict(failure.code, failure=failure)
    if stop:
        return replace(stopped(saved, completed, stop), failure=failure)
    if not max_restarts:
        return Verdict(failure.code, failure=failure)
    tried = [each for each in earlier if not spare_waits or each.host != failure.host]
    if any(failure.repeats(other) for other in tried):
        why = f"not restarted: step {failure.step} failed before, with the same message"
        return Verdict(FAILED, why, failure)
    if sum(failure.time - each.time < DAY_SECONDS for each in earlier) >= MOST_A_DAY:
        return Verdict(GIVEN_UP, f"given up: {MOST_A_DAY} restarts within a day", failure)
    restarts = sum(each.saved_step == saved.step for each in earlier)
    if restarts >= max_restarts:
        return Verdict(GIVEN_UP, f"given up: fault.max_restarts = {max_restarts}", failure)
    lost = max(0, completed - saved.step)
    steps = "step" if lost == 1 else "steps"
    why = f"restart {restarts + 1} of {max_restarts}, {saved.source}; {lost} {steps} lost"
    return Verdict(None, why, failure, resumes=saved.by_this_run, first_step=saved.step + 1)


def stopped(saved: Saved, completed: int, stop: str) -> Verdict:
    """Return the end of a run by a request that came when no rank could save."""
    lost = max(0, completed - saved.step)
    step = 0
    if completed or saved.by_this_run:
        step = saved.step + lost
    code = CUT_SHORT if lost else STOPPED
    return Verdict(code, early=EarlyExit(code, step, stop, lost))


def _of_launcher(words: str, seconds: float) -> Failure:
    return Failure(-1, socket.gethostname(), time.time() - seconds, None, words, words, known=False)
