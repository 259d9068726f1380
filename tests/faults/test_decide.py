"""Node 0's decisions: (statuses, now) in, who takes part, what failed first and what follows out.
No process.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count, repeat
from pathlib import Path
from typing import Any

import pytest

from tests.messages import says
from titanlite.config.schema import config_of
from titanlite.errors import CUT_SHORT, FAILED, GIVEN_UP, STOPPED
from titanlite.fault.decide import Decider, Restarts, Saved, after, stopped
from titanlite.fault.status import Beat, Decision, Ended, Failure, Inspection, Status
from titanlite.runtime.page import EarlyExit

SAVED = Saved(4, "from here/step-4", by_this_run=True)
BEAT = Beat(7, "forward", 70, 0.0, 10.0, "fault.stall_seconds", 1, "here", completed=6)
ASKED = "SIGTERM to the launcher"


def failure(step: int | None, words: str, **more: Any) -> Failure:
    """Return one after the checkpoint that is still the newest."""
    values: dict[str, Any] = {"saved_step": SAVED.step, **more}
    return Failure(1, "here", 5.0, step, words, words, **values)


ERROR = failure(7, "ValueError: x")
KILL = failure(7, "exited without a traceback (SIGKILL)", known=False)
MISTAKE = failure(7, "UserError: x", is_user_error=True, code=2)


def failed(error: Failure = KILL, **changes: Any) -> Ended:
    return Ended(replace(error, **changes), over=True)


DONE, FOLLOWED, KILLED, MISTAKEN = Ended(), Ended(over=True), failed(), failed(MISTAKE)
SAVED_LAST = Ended(early=EarlyExit(STOPPED, 7, "SIGTERM to rank 0", 0))
CUT = Ended(early=EarlyExit(CUT_SHORT, 6, ASKED, 2), over=True)
ONE_FAILED, TWO_FAILED = (failed(ERROR, step=0, rank=2, host=host) for host in ("one", "two"))
ASLEEP = Inspection("sleeping")
EVENTS: dict[str, Ended | dict[str, Any]] = {
    "done": DONE,
    "followed": FOLLOWED,
    "killed": KILLED,
    "rank 0 killed": failed(rank=0),
    "rank 2 killed": failed(rank=2),
    "killed in step 7": {"beats": {1: BEAT}, "ended": failed(step=None)},
    "raised": failed(ERROR),
    "rank 0 raised earlier": failed(ERROR, rank=0, time=4.0),
    "rank 2 raised later": failed(ERROR, rank=2, time=6.0),
    "failed on host one": ONE_FAILED,
    "failed on host two": TWO_FAILED,
    "mistaken": MISTAKEN,
    "saved": SAVED_LAST,
    "cut short": CUT,
    "late from attempt 1": {"attempt": 1, "ended": KILLED},
    "left": {"left": True},
    "left mistaken": {"left": True, "ended": failed(MISTAKE, rank=-1)},
    "left saved": {"left": True, "ended": SAVED_LAST},
    "another left": {"left": True, "ended": MISTAKEN, "incarnation": 2, "attempt": 3, "count": 9},
    "another": {"incarnation": 2, "attempt": 2},
    "with four": {"processes": 4},
    "asked": {"stop": "SIGTERM to rank 3"},
    "interrupted": {"stop": "Ctrl-C"},
    "beats": {"beats": {0: BEAT, 1: BEAT}},
    "beats too": {"beats": {2: BEAT, 3: BEAT}},
    "inspected": {"found": {0: ASLEEP, 1: ASLEEP}},
    "inspected too": {"found": {2: Inspection("stopped"), 3: ASLEEP}},
    "followed, inspected": {"ended": FOLLOWED, "found": {}},
}
"""What becomes of a node's status; its ranks have ended in most. FOLLOWED ones were ended because
of another node's.
"""


def outcome(decision: Decision) -> str:
    """Return what a decision says, in few words."""
    verdict = decision.verdict
    cause = verdict.failure if verdict else None
    who = f" after {f'rank {cause.rank}' if cause.rank >= 0 else 'a launcher'}" if cause else ""
    if verdict and verdict.early:
        return f"exits with {verdict.code}, {verdict.early.lost} steps lost"
    if verdict and decision.is_final:
        return f"exits with {verdict.code}{who}"
    if decision.members:
        running = f"runs {' '.join(map(str, decision.members))}"
        return "ends" if decision.failed else "inspects" if decision.hangs else running
    return f"again{who}" if verdict else "waits"


def play(
    folder: Path,
    script: str,
    nodes: int = 2,
    spare: int = 0,
    fits: str = "",
    saves: Iterator[int] | None = None,
    least: int = 0,
) -> None:
    """Follow the lines of a script: SECONDS: NODE EVENT, … -> OUTCOME | what the decision names.

    A node that is "ready N" would like to take part in attempt N. Each shows a sign of life at
    every look unless it is silent."""
    values: dict[str, Any] = {"comm.init_timeout_seconds": 100, "fault.rejoin_seconds": 30}
    values |= {"fault.min_nodes": least, "job.dump_folder": str(folder)}
    steps = saves or repeat(SAVED.step)
    restarts = Restarts(3, lambda world: fits, lambda: replace(SAVED, step=next(steps)))
    decider = Decider(config_of(values), nodes, 0.0, restarts, spare)
    statuses: dict[int, Status] = {}
    silent: set[int] = set()
    for line in filter(None, map(str.strip, script.splitlines())):
        now, what = line.split(":", 1)
        events, expected = what.split("->")
        for event in filter(None, map(str.strip, events.split(","))):
            node, word = int(event[0]), event[2:]
            if word == "silent":
                silent.add(node)
                continue
            changes: Any = EVENTS.get(word)
            if changes is None:
                changes = {"attempt": int(word.removeprefix("ready ")), "ended": None}
            if isinstance(changes, Ended):
                changes = {"ended": changes}
            statuses[node] = replace(statuses.get(node, Status(processes=2)), **changes)
        for node in statuses.keys() - silent:
            statuses[node] = replace(statuses[node], count=statuses[node].count + 1)
        decision = decider.look(statuses, float(now))
        expected, *names = map(str.strip, expected.split("|"))
        assert outcome(decision) == expected, f"{line}\n{decision}"
        says(f"{decision}{decider.waits_for}", *names)
        assert fits != "no memory" or "min_nodes" not in f"{decision}"


def named(cases: dict[str, Any]) -> Any:
    return pytest.mark.parametrize("case", cases.values(), ids=cases)


RUNNING = "1: 0 ready 1, 1 ready 1 -> runs 0 1\n"
RANK_2_FAILS_TWICE = """
    10: 0 ready 1, 1 ready 1 -> runs 0 1
    11: 0 rank 2 killed, 1 rank 2 killed -> again after rank 2
    20: 0 ready 2, 1 ready 2 -> runs 0 1
    21: 0 rank 2 killed, 1 rank 2 killed -> again after rank 2 | NODE_RANK 1 failed
"""
NODE_1_IS_LOST = f"""{RUNNING}
    20: 0 followed, 1 silent -> again after a launcher | NODE_RANK=1 | 1 of 3 | step-4
    26: -> again after a launcher
    50: 0 ready 2 -> again after a launcher | NODE_RANK 1, at most 30 s (fault.rejoin_seconds)
"""
TOO_FEW = "56.5: -> exits with 76 | 1 of 2 | 30 s (fault.rejoin_seconds) | NODE_RANK 1"
WITHOUT = " | fault.min_nodes = 1"


@named(
    {
        "the first attempt begins with all nodes, also where fewer would be enough": (
            {"least": 1},
            """
            99: 0 ready 1 -> waits
            99.5: 1 ready 1 -> runs 0 1""",
        ),
        "missing nodes are named when the time is over": (
            {"nodes": 4, "least": 1},
            """
            100: 0 ready 1, 2 ready 1 -> waits | NODE_RANK 1, 3, at most 100 s (comm.init_
            100.1: -> exits with 76 | 2 of 4 | 100 s (comm.init_timeout | NODE_RANK 1, 3""",
        ),
        "a run begins without its spare node, which takes the place of a lost one": (
            {"nodes": 3, "spare": 1},
            """
            1: 0 ready 1 -> waits
            2: 2 ready 1 -> runs 0 2
            3: 1 ready 2, 2 silent -> runs 0 2
            18.1: -> ends
            20: 0 followed -> again after a launcher
            21: 0 ready 2 -> runs 0 1""",
        ),
        "too few nodes with a spare are counted without it": (
            {"nodes": 4, "spare": 1},
            """
            99: 0 ready 1, 3 ready 1 -> waits
            100.1: -> exits with 76 | 2 of 3 | NODE_RANK 1, 2""",
        ),
        "a node whose rank failed twice makes room for a spare": (
            {"nodes": 3, "spare": 1},
            f"""{RANK_2_FAILS_TWICE}
            22: 0 ready 3, 1 ready 3, 2 ready 3 -> runs 0 2""",
        ),
        "node 0 stays, which has the store": (
            {"nodes": 3, "spare": 1},
            f"""{RANK_2_FAILS_TWICE.replace("rank 2", "rank 0").partition(" | ")[0]}
            22: 0 ready 3, 1 ready 3, 2 ready 3 -> runs 0 1""",
        ),
        "what failed twice on a node is tried on a spare that waits": (
            {"nodes": 3, "spare": 1},
            """
            10: 0 ready 1, 1 ready 1, 2 ready 1 -> runs 0 1
            11: 0 failed on host one, 1 failed on host one -> again after rank 2
            20: 0 ready 2, 1 ready 2, 2 ready 2 -> runs 0 1
            21: 0 failed on host one, 1 failed on host one -> again after rank 2
            30: 0 ready 3, 1 ready 3, 2 ready 3 -> runs 0 2
            31: 0 failed on host two, 2 failed on host two -> exits with 1 after rank 2 | step 0""",
        ),
        "what failed twice on a node ends a run whose spare has left": (
            {"nodes": 3, "spare": 1},
            """
            10: 0 ready 1, 1 ready 1, 2 left -> runs 0 1
            11: 0 failed on host one, 1 failed on host one -> again after rank 2
            20: 0 ready 2, 1 ready 2 -> runs 0 1
            21: 0 failed on host one, 1 failed on host one -> exits with 1 after rank 2 | step 0""",
        ),
        "nodes that did not fail are waited for and come first": (
            {"nodes": 4, "spare": 1},
            """
            10: 0 ready 1, 1 ready 1, 2 ready 1 -> runs 0 1 2
            11: 0 rank 2 killed, 1 rank 2 killed, 2 rank 2 killed -> again after rank 2
            20: 0 ready 2, 1 ready 2, 2 ready 2 -> runs 0 1 2
            21: 0 rank 2 killed, 1 rank 2 killed, 2 rank 2 killed -> again after rank 2
            22: 0 ready 3, 1 ready 3, 3 ready 3 -> again after rank 2
            53: -> runs 0 1 3""",
        ),
        "nodes with different numbers of processes are refused": (
            {},
            "1: 0 ready 1, 1 with four -> exits with 2 | node 0: 2, node 1: 4 | NGPU",
        ),
        "a spare node with another number of processes is left out": (
            {"nodes": 3, "spare": 1},
            "1: 0 ready 1, 1 with four, 2 ready 1 -> runs 0 2",
        ),
        "a later attempt goes on with fewer nodes": (
            {"least": 1},
            f"{NODE_1_IS_LOST}56.5: -> runs 0",
        ),
        "it does not by default, and names the key": ({}, NODE_1_IS_LOST + TOO_FEW + WITHOUT),
        "it does not below the least number": ({"least": 2}, NODE_1_IS_LOST + TOO_FEW + WITHOUT),
        "where fewer do not fit it does not name the key": (
            {"fits": "no memory"},
            NODE_1_IS_LOST + TOO_FEW,
        ),
        "it does not where fewer do not fit": (
            {"least": 1, "fits": "no memory"},
            f"{NODE_1_IS_LOST}56.5: -> exits with 76 | NODE_RANK 1: no memory",
        ),
        "a silent node is not counted in": (
            {},
            """
            1: 0 ready 1, 1 ready 2 -> waits
            2: 1 silent -> waits
            17.1: 1 ready 1 -> waits""",
        ),
        "the time to meet again begins when node 0 is ready": (
            {},
            f"""{RUNNING}
            2: 0 killed, 1 killed -> again after rank 1
            33: 1 ready 2 -> again after rank 1
            62: -> again after rank 1
            91: 0 ready 2, 1 ready 1 -> again after rank 1
            93: -> exits with 76 | NODE_RANK 1""",
        ),
        "a launcher that ends while nodes meet ends the run": (
            {},
            "1: 0 ready 1, 1 left mistaken -> exits with 2 | UserError: x",
        ),
        "a launcher that is stopped while nodes meet ends the run": (
            {},
            "1: 0 ready 1, 1 left saved -> exits with 75, 0 steps lost",
        ),
        "it ends with the steps that the attempt before has lost": (
            {},
            f"""{RUNNING}
            2: 0 followed, 1 killed in step 7 -> again after rank 1
            3: 0 ready 2, 1 left saved -> exits with 76, 2 steps lost""",
        ),
        "a launcher that left long ago does not end the next attempt": (
            {"nodes": 3, "least": 2},
            """
            1: 0 ready 1, 1 ready 1, 2 ready 1 -> runs 0 1 2
            2: 0 killed, 1 silent, 2 killed -> ends
            8: -> again after rank 1
            40: 0 ready 2, 2 ready 2 -> runs 0 2
            50: 1 another left -> runs 0 2
            100: 0 killed, 2 killed -> again after rank 1
            101: 0 ready 3, 2 ready 3 -> again after rank 1
            132: -> runs 0 2""",
        ),
    }
)
def test_who_takes_part(tmp_path, case):
    options, script = case
    play(tmp_path, script, **options)


@named(
    {
        "it is done when all nodes are": """
            2: 0 done -> runs 0 1
            3: 1 done -> exits with 0""",
        "a failure on one node ends the others, and the first one counts": """
            2: 1 rank 2 raised later -> ends
            3: 0 raised -> again after rank 1""",
        "a failure is not waited for longer than five seconds": """
            2: 1 killed -> ends
            7: -> ends
            7.1: -> again after rank 1""",
        "a kill comes before what others say of it": """
            2: 0 rank 0 raised earlier, 1 killed -> again after rank 1""",
        "a user's mistake comes before all": """
            2: 0 rank 0 raised earlier, 1 mistaken -> exits with 2 after rank 1""",
        "the step of a killed rank is that of its last beat": """
            2: 0 followed, 1 killed in step 7 -> again after rank 1 | step=7 | 2 steps""",
        "a node without a sign of life is lost": """
            16: 1 silent -> runs 0 1
            16.1: -> ends
            20: 0 followed -> again after a launcher | NODE_RANK=1""",
        "a node that is done need not live": """
            2: 1 done -> runs 0 1
            60: 1 silent -> runs 0 1
            61: 0 done -> exits with 0""",
        "another launcher in a node's place ends the attempt": """
            2: 1 another -> ends
            3: 0 followed -> again after a launcher | NODE_RANK=1 | another
            4: 0 ready 2 -> runs 0 1""",
        "launchers that lost each other start again": """
            2: 0 followed, 1 followed -> again after a launcher""",
        "the end of node 0's launcher ends the run": """
            2: 0 left mistaken -> exits with 2 | node 0 | UserError: x""",
        "where node 0 leaves after its ranks saved, the others end as it did": """
            2: 0 left saved -> exits with 75, 0 steps lost""",
        "the end of an earlier attempt is not that of this one": """
            2: 0 killed, 1 killed -> again after rank 1
            3: 0 ready 2, 1 ready 2 -> runs 0 1
            4: 1 late from attempt 1 -> runs 0 1""",
        "one rank that saved its last step is enough": """
            2: 0 saved, 1 raised -> exits with 75, 0 steps lost""",
        "a node whose ranks were killed ends the others": """
            2: 1 cut short -> ends
            3: 0 followed -> exits with 76, 2 steps lost""",
        "ranks that save are not ended by a node that has saved": """
            2: 1 saved -> runs 0 1""",
        "the first request reaches all nodes and stays": """
            2: 1 asked -> runs 0 1 | SIGTERM to rank 3
            3: 0 interrupted -> runs 0 1 | SIGTERM to rank 3""",
    }
)
def test_how_an_attempt_ends(tmp_path, case):
    play(tmp_path, RUNNING + case)


@named(
    {
        "ranks may die while they are inspected, and then the report is the failure": """
            13: 0 inspected, 1 killed -> inspects
            14: 1 inspected too -> ends | rank 2: stopped
            15: 0 followed -> again after a launcher | rank 2: stopped | hang-1.txt""",
        "a hang is reported without a node that does not inspect its ranks": """
            19.9: -> inspects
            20.1: -> ends | 10 s""",
        "the next attempt is watched anew": """
            20.1: -> ends
            21: 0 followed, 1 followed -> again after a launcher
            22: 0 ready 2, 1 ready 2 -> runs 0 1
            23: -> runs 0 1""",
    }
)
def test_a_hang(tmp_path, case):
    hung = "2: 0 beats, 1 beats too -> runs 0 1\n"
    hung += "".join(f"{now}: -> runs 0 1\n" for now in range(3, 12))
    play(tmp_path, f"{RUNNING}{hung}12: -> inspects\n{case}")


def test_the_budget_of_restarts_is_spent_over_attempts_that_save_nothing(tmp_path):
    attempt = "{0}0: 0 ready {0}, 1 ready {0} -> runs 0 1\n{0}1: 0 killed, 1 killed -> "
    again = f"{attempt}again after rank 1\n"
    spent = f"{attempt.format(4)}exits with {GIVEN_UP} after rank 1"
    play(tmp_path, "".join(map(again.format, (1, 2, 3))) + spent)
    play(tmp_path, "".join(map(again.format, range(1, 9))), saves=count(1))


# ---------------------------------------------------------------- what follows a failure

OLDER = replace(KILL, saved_step=2)
UNKNOWN = failure(None, "x")


@pytest.mark.parametrize(
    ("code", "failed", "earlier", "most", "stop"),
    [
        (None, ERROR, [], 3, ""),
        (None, KILL, [KILL, KILL], 3, ""),
        (None, ERROR, [replace(ERROR, step=8), replace(ERROR, words="y")], 3, ""),
        (None, UNKNOWN, [UNKNOWN], 3, ""),  # maybe in another step
        (FAILED, ERROR, [ERROR, KILL], 3, ""),
        (FAILED, ERROR, [KILL], 0, ""),  # as without checkpoints
        (MISTAKE.code, MISTAKE, [], 3, ""),
        (GIVEN_UP, ERROR, [KILL] * 3, 3, ""),
        # A new checkpoint starts the count again, up to 24 restarts of any kind within a day.
        (None, ERROR, [*[OLDER] * 3, KILL], 3, ""),
        (GIVEN_UP, ERROR, [OLDER, *[KILL] * 3], 3, ""),
        (GIVEN_UP, ERROR, [OLDER] * 24, 3, ""),
        (None, replace(ERROR, time=ERROR.time + 86401), [OLDER] * 24, 3, ""),
        # A request comes before the budget.
        (CUT_SHORT, ERROR, [], 0, ASKED),
        (CUT_SHORT, ERROR, [KILL] * 3, 3, ASKED),
        (CUT_SHORT, ERROR, [ERROR], 3, ASKED),
    ],
)
def test_what_would_fail_again_is_not_restarted(code, failed, earlier, most, stop):
    verdict = after(failed, earlier, most, SAVED, 6, stop)
    assert (verdict.code, verdict.failure) == (code, failed)


@pytest.mark.parametrize(("completed", "code", "lost"), [(4, STOPPED, 0), (6, CUT_SHORT, 2)])
def test_a_failure_after_a_request_leaves_a_run_to_start_again(completed, code, lost):
    verdict = after(replace(ERROR, step=None), [], 3, SAVED, completed, ASKED)
    assert verdict.code == code
    assert verdict.early == EarlyExit(code, completed, ASKED, lost)


def test_a_stop_claims_no_step_that_only_an_earlier_run_took_and_saved():
    earlier = replace(SAVED, by_this_run=False)
    assert stopped(earlier, 0, ASKED).early == EarlyExit(STOPPED, 0, ASKED, 0)
    assert stopped(SAVED, 0, ASKED).early == EarlyExit(STOPPED, 4, ASKED, 0)


def test_a_restart_says_what_is_lost_and_resumes_only_what_this_run_saved():
    verdict = after(ERROR, [KILL], 3, SAVED, 5)
    says(verdict.why, "restart 2 of 3", "here/step-4", "1 step lost")
    assert verdict.resumes and verdict.first_step == 5
    verdict = after(ERROR, [], 3, Saved(), 0)
    says(verdict.why, "restart 1 of 3", "0 steps lost")
    assert not verdict.resumes and verdict.first_step == 1
