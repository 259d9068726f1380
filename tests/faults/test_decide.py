"""Node 0's decisions: (statuses, now) in, who takes part, what failed first and what follows out.
No process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from titanlite.config.schema import config_of
from titanlite.errors import CUT_SHORT, FAILED, GIVEN_UP, OK, REFUSED, STOPPED
from titanlite.fault.decide import GATHER_SECONDS, SILENCE_SECONDS, Decider, Restarts, Saved, after
from titanlite.fault.status import Beat, Decision, Ended, Failure, Inspection, Status, dump, parse
from titanlite.runtime.page import EarlyExit

SAVED = Saved(4, "from here/step-4", by_this_run=True)
BEAT = Beat(7, "forward", 70, 0.0, 10.0, "fault.stall_seconds", 1, "here", completed=6)


class Board:
    """Nodes as a decider sees them; each shows a sign of life at every look unless it is silent."""

    def __init__(
        self,
        nodes: int = 2,
        folder: Path = Path("nowhere"),
        fits: str = "",
        saved: Callable[[], Saved] = lambda: SAVED,
        spare: int = 0,
        **fault: int,
    ) -> None:
        values: dict[str, object] = {"comm.init_timeout_seconds": 100, "fault.rejoin_seconds": 30}
        values |= {f"fault.{key}": value for key, value in fault.items()}
        config = config_of({**values, "job.dump_folder": str(folder)})
        restarts = Restarts(3, lambda world: fits, saved)
        self.decider = Decider(config, nodes, 0.0, restarts, spare)
        self.statuses: dict[int, Status] = {}
        self.silent: set[int] = set()

    def put(self, node: int, **changes: object) -> Board:
        self.statuses[node] = replace(self.statuses.get(node, Status(processes=2)), **changes)  # type: ignore[arg-type]
        return self

    def look(self, now: float) -> Decision:
        for node, status in self.statuses.items():
            if node not in self.silent:
                self.statuses[node] = replace(status, count=status.count + 1)
        return self.decider.look(self.statuses, now)

    def running(self, attempt: int = 1, now: float = 1.0) -> Board:
        """Return the board with all nodes in an attempt."""
        for node in range(2):
            self.put(node, attempt=attempt, ended=None)
        assert self.look(now).members == (0, 1)
        return self


def failure(step: int | None, words: str, **more: object) -> Failure:
    """Return one after the checkpoint that is still the newest."""
    return Failure(1, "here", 5.0, step, words, words, **{"saved_step": SAVED.step, **more})  # type: ignore[arg-type]


ERROR = failure(7, "ValueError: x")
KILL = failure(7, "exited without a traceback (SIGKILL)", known=False)


# ---------------------------------------------------------------- who takes part


def test_the_first_attempt_begins_when_all_nodes_are_there():
    board = Board(min_nodes=1).put(0)
    assert board.look(99).members == (), "the first one also where fewer would be enough"
    assert board.put(1).look(99.5).members == (0, 1)


def test_missing_nodes_are_named_when_the_time_is_over():
    board = Board(nodes=4, min_nodes=1).put(0).put(2)
    assert not board.look(100).is_final
    verdict = board.look(100.1).verdict
    assert (
        verdict
        and verdict.code == FAILED
        and verdict.why
        == (
            "only 2 of 4 nodes connected within 100 s (comm.init_timeout_seconds); "
            "missing: NODE_RANK 1, 3"
        )
    )


def test_a_run_begins_without_its_spare_nodes_and_takes_one_for_a_lost_node():
    board = Board(nodes=3, spare=1).put(0)
    assert board.look(1).members == ()
    assert board.put(2).look(2).members == (0, 2), "the first that are there, in order"
    board.put(1, attempt=2).silent = {2}
    board.look(3)
    assert board.look(4 + SILENCE_SECONDS).failed
    board.put(0, ended=Ended(over=True)).look(5 + SILENCE_SECONDS)
    board.put(0, attempt=2, ended=None)
    assert board.look(6 + SILENCE_SECONDS).members == (0, 1)


def test_too_few_nodes_with_a_spare_are_counted_without_it():
    board = Board(nodes=4, spare=1).put(0).put(3)
    board.look(99)
    verdict = board.look(100.1).verdict
    assert verdict and verdict.why.startswith("only 2 of 3 nodes connected within 100 s"), verdict
    assert verdict.why.endswith("missing: NODE_RANK 1, 2")


def failed_twice(rank: int, nodes: int) -> Board:
    """Return a board with one spare, after two attempts that a rank ended before it had a beat."""
    board, members = Board(nodes=nodes, spare=1), range(nodes - 1)
    for attempt in (1, 2):
        for node in members:
            board.put(node, attempt=attempt, ended=None)
        assert board.look(10 * attempt).members == (*members,)
        for node in members:
            board.put(node, ended=Ended(replace(KILL, rank=rank), over=True))
        verdict = board.look(10 * attempt + 1).verdict
        assert verdict
        named = "NODE_RANK 1 failed twice: a spare node" in verdict.why
        assert named == (rank == 2 and attempt == 2), verdict.why
    return board


@pytest.mark.parametrize(("rank", "members"), [(2, (0, 2)), (0, (0, 1))])
def test_a_node_whose_rank_failed_twice_makes_room_for_a_spare_and_node_0_stays(rank, members):
    board = failed_twice(rank, 3)
    for node in range(3):
        board.put(node, attempt=3, ended=None)
    assert board.look(22).members == members


@pytest.mark.parametrize("left", [False, True], ids=["waits", "has left"])
def test_what_failed_twice_on_a_node_is_tried_on_a_spare_if_one_waits(left):
    board = Board(nodes=3, spare=1).put(2, left=left)
    codes = []
    for attempt, rank in ((1, 2), (2, 2), (3, 3)):
        members = (0, 2) if attempt == 3 else (0, 1)
        for node in range(3):
            board.put(node, attempt=attempt, ended=None)
        assert board.look(10 * attempt).members == members
        failed = replace(ERROR, step=0, rank=min(rank, 2), host=f"host of {members[1]}")
        for node in members:
            board.put(node, ended=Ended(failed, over=True))
        verdict = board.look(10 * attempt + 1).verdict
        assert verdict
        codes.append(verdict.code)
        if verdict.code:
            assert verdict.why == "not restarted: step 0 failed before, with the same words"
            break
    assert codes == ([None, FAILED] if left else [None, None, FAILED])


def test_nodes_that_did_not_fail_are_waited_for_and_come_first():
    board = failed_twice(2, 4)
    for node in (0, 1, 3):
        board.put(node, attempt=3, ended=None)
    assert board.look(22).members == (), "node 2 is late"
    assert board.look(22 + 31).members == (0, 1, 3), "and does not come"
    board = failed_twice(2, 4)
    board.decider._failed_on[2] = 2
    for node in range(4):
        board.put(node, attempt=3, ended=None)
    assert board.look(22).members == (0, 1, 3)


def test_nodes_with_different_numbers_of_processes_are_refused():
    board = Board(nodes=3, spare=1).put(0).put(1, processes=4).put(2)
    assert board.look(1).members == (0, 2), "a spare one is left out"
    verdict = Board().put(0).put(1, processes=4).look(1).verdict
    assert verdict and verdict.code == REFUSED
    assert "the nodes have different numbers of processes (node 0: 2, node 1: 4)" in verdict.why


@pytest.mark.parametrize(
    ("least", "fits", "members", "why"),
    [
        (1, "", (0,), ""),
        (
            0,
            "",
            (),
            "only 1 of 2 nodes connected within 30 s (fault.rejoin_seconds); missing: NODE_RANK 1",
        ),
        (
            2,
            "",
            (),
            "only 1 of 2 nodes connected within 30 s (fault.rejoin_seconds); missing: NODE_RANK 1",
        ),
        (1, "no memory", (), "without NODE_RANK 1: no memory"),
    ],
)
def test_a_later_attempt_goes_on_with_fewer_nodes_if_that_is_allowed_and_fits(
    least, fits, members, why
):
    board = Board(fits=fits, min_nodes=least).running()
    board.silent.add(1)
    board.put(0, ended=Ended(over=True))
    board.look(20)
    verdict = board.look(20 + GATHER_SECONDS + 1).verdict
    assert (
        verdict
        and verdict.code is None
        and verdict.why == "restart 1 of 3, from here/step-4; 0 steps lost"
    )
    assert (
        verdict.failure and verdict.failure.words == "the launcher of NODE_RANK=1 does not answer"
    )
    board.put(0, attempt=2, ended=None)
    assert not board.look(50).members
    decision = board.look(56.5)
    assert decision.members == members and decision.prepared == board.statuses[0].prepared
    assert bool(why) == decision.is_final
    if why:
        assert decision.verdict and decision.verdict.why == why
        assert decision.verdict.code == CUT_SHORT, "a new start may find other nodes"


def test_a_silent_node_is_not_counted_in():
    board = Board().put(0).put(1, attempt=2)
    board.look(1)
    board.silent.add(1)
    board.put(1, attempt=1)
    assert board.look(2 + SILENCE_SECONDS).members == ()


def test_the_time_to_meet_again_begins_when_node_0_is_ready(tmp_path):
    board = Board().running()
    for node in range(2):
        board.put(node, ended=Ended(KILL, over=True))
    assert board.look(2).attempt == 2
    board.put(1, attempt=2, ended=None)
    assert not board.look(2 + 31).is_final and not board.look(2 + 60).members, (
        "node 0 is still moving logs"
    )
    board.put(0, attempt=2, ended=None)
    board.put(1, attempt=1)
    assert not board.look(2 + 89).is_final
    verdict = board.look(2 + 91).verdict
    assert verdict and verdict.code == CUT_SHORT and "missing: NODE_RANK 1" in verdict.why


def test_a_launcher_that_ends_while_nodes_meet_ends_the_run():
    board = (
        Board()
        .put(0)
        .put(
            1,
            left=True,
            ended=Ended(failure(None, "the launcher has ended: x", code=75), over=True),
        )
    )
    verdict = board.look(1).verdict
    assert verdict and (verdict.code, verdict.why) == (75, "the launcher has ended: x")


@pytest.mark.parametrize("lost", [False, True])
def test_a_launcher_that_is_stopped_while_nodes_meet_ends_the_run_with_the_lost_steps(lost):
    board, left = Board(), EarlyExit(STOPPED, 4, "SIGTERM to the launcher", 0)
    if lost:
        board.running()
        for node in range(2):
            board.put(node, beats={node: BEAT}, ended=Ended(KILL, over=True))
        assert board.look(2).attempt == 2
    board.put(0, attempt=1 + lost, ended=None).put(1, left=True, ended=Ended(early=left, over=True))
    verdict = board.look(3).verdict
    assert verdict and verdict.early
    assert (verdict.code, verdict.early.lost) == ((CUT_SHORT, 2) if lost else (STOPPED, 0))


def test_a_launcher_that_left_long_ago_does_not_end_the_next_attempt():
    board = Board(nodes=3, min_nodes=2)
    for node in range(3):
        board.put(node)
    assert board.look(1).members == (0, 1, 2)
    board.silent.add(1)
    for node in (0, 2):
        board.put(node, ended=Ended(KILL, over=True))
    board.look(2)
    assert board.look(2 + GATHER_SECONDS + 1).attempt == 2
    for node in (0, 2):
        board.put(node, attempt=2, ended=None)
    assert board.look(40).members == (0, 2)
    mistake = failure(None, "no space left", is_user_error=True, code=2)
    board.put(1, incarnation=2, attempt=3, count=9, left=True, ended=Ended(mistake, over=True))
    assert board.look(50).members == (0, 2)
    for node in (0, 2):
        board.put(node, ended=Ended(KILL, over=True))
    board.look(100)
    for node in (0, 2):
        board.put(node, attempt=3, ended=None)
    assert not board.look(101).is_final
    assert board.look(132).members == (0, 2)


# ---------------------------------------------------------------- how an attempt ends


def test_an_attempt_is_done_when_all_nodes_are():
    board = Board().running().put(0, ended=Ended())
    assert not board.look(2).is_final
    verdict = board.put(1, ended=Ended()).look(3).verdict
    assert verdict and verdict.code == OK and not board.decider.decision.failed


def test_a_failure_on_one_node_ends_the_others_and_the_first_one_counts():
    board = Board().running().put(1, ended=Ended(replace(ERROR, time=6.0), over=True))
    decision = board.look(2)
    assert decision.failed and not decision.is_final, "node 0 may have an earlier one"
    verdict = board.put(0, ended=Ended(ERROR, over=True)).look(3).verdict
    assert verdict and verdict.failure == ERROR and verdict.code is None and verdict.resumes
    assert (board.decider.decision.attempt, board.decider.decision.members) == (2, ())


def test_a_failure_is_not_waited_for_longer_than_five_seconds():
    board = Board().running().put(1, ended=Ended(ERROR, over=True))
    board.look(2)
    assert board.look(2 + GATHER_SECONDS).attempt == 1
    verdict = board.look(2.1 + GATHER_SECONDS).verdict
    assert verdict and verdict.failure == ERROR


def test_a_kill_comes_before_what_others_say_of_it_and_a_users_mistake_before_all():
    lost, mistake = replace(ERROR, time=4.0), failure(7, "UserError: x", is_user_error=True, code=2)
    for own, expected, code in ((KILL, KILL, None), (mistake, mistake, 2)):
        board = (
            Board()
            .running()
            .put(0, ended=Ended(lost, over=True))
            .put(1, ended=Ended(own, over=True))
        )
        verdict = board.look(2).verdict
        assert verdict and verdict.failure == expected and verdict.code == code


def test_the_step_of_a_killed_rank_is_that_of_its_last_beat():
    board = (
        Board().running().put(1, beats={1: BEAT}, ended=Ended(replace(KILL, step=None), over=True))
    )
    board.put(0, ended=Ended(over=True))
    verdict = board.look(2).verdict
    assert verdict and verdict.failure and verdict.failure.step == 7
    assert verdict.why == "restart 1 of 3, from here/step-4; 2 steps lost"


def test_a_node_without_a_sign_of_life_is_lost():
    board = Board().running()
    board.silent.add(1)
    assert not board.look(1 + SILENCE_SECONDS).failed
    assert board.look(1.1 + SILENCE_SECONDS).failed
    verdict = board.put(0, ended=Ended(over=True)).look(20).verdict
    assert (
        verdict
        and verdict.failure
        and verdict.failure.words == "the launcher of NODE_RANK=1 does not answer"
    )


def test_a_node_that_is_done_need_not_live():
    board = Board().running().put(1, ended=Ended())
    board.silent.add(1)
    assert not board.look(60).failed
    verdict = board.put(0, ended=Ended()).look(61).verdict
    assert verdict and verdict.code == OK


def test_another_launcher_in_a_nodes_place_ends_the_attempt():
    board = Board().running().put(1, incarnation=2, attempt=2)
    assert board.look(2).failed
    verdict = board.put(0, ended=Ended(over=True)).look(3).verdict
    words = "the launcher of NODE_RANK=1 ended, and another has taken its place"
    assert verdict and verdict.failure and verdict.failure.words == words
    assert board.put(0, attempt=2, ended=None).look(4).members == (0, 1)


def test_launchers_that_lost_each_other_start_again():
    board = Board().running().put(0, ended=Ended(over=True)).put(1, ended=Ended(over=True))
    verdict = board.look(2).verdict
    assert verdict and verdict.code is None and verdict.failure
    assert verdict.failure.words == "the launchers lost contact with each other"


def test_the_end_of_node_0s_launcher_ends_the_run():
    board = (
        Board()
        .running()
        .put(0, left=True, ended=Ended(failure(None, "no space left", code=28), over=True))
    )
    verdict = board.look(2).verdict
    assert verdict and (verdict.code, verdict.why) == (28, "node 0: no space left")


def test_where_node_0_leaves_after_its_ranks_saved_the_others_end_as_it_did():
    saved = EarlyExit(STOPPED, 7, "SIGTERM to rank 0", 0)
    verdict = Board().running().put(0, left=True, ended=Ended(early=saved)).look(2).verdict
    assert verdict and (verdict.code, verdict.early) == (STOPPED, saved)


def test_the_end_of_an_earlier_attempt_is_not_that_of_this_one():
    board = (
        Board().running().put(0, ended=Ended(KILL, over=True)).put(1, ended=Ended(KILL, over=True))
    )
    assert board.look(2).attempt == 2
    board.running(2, 3.0)
    assert not board.put(1, attempt=1, ended=Ended(KILL, over=True)).look(4).failed, (
        "a delayed exchange wrote it"
    )


# ---------------------------------------------------------------- a request to stop


def test_the_first_request_reaches_all_nodes_and_stays():
    board = Board().running().put(1, stop="SIGTERM to rank 3")
    assert board.look(2).stop == "SIGTERM to rank 3"
    assert board.put(0, stop="Ctrl-C").look(3).stop == "SIGTERM to rank 3"


def test_one_rank_that_saved_its_last_step_is_enough():
    saved, late = (
        EarlyExit(STOPPED, 7, "SIGTERM to rank 0", 0),
        EarlyExit(CUT_SHORT, 6, "x; another rank had left", 2),
    )
    board = (
        Board()
        .running()
        .put(0, ended=Ended(early=saved))
        .put(1, ended=Ended(ERROR, late, over=True))
    )
    verdict = board.look(2).verdict
    assert verdict and verdict.code == STOPPED and verdict.early == saved and not verdict.failure


def test_a_node_whose_ranks_were_killed_ends_the_others():
    killed = EarlyExit(CUT_SHORT, 6, "SIGTERM to the launcher; second signal: SIGTERM", 2)
    board = Board().running().put(1, ended=Ended(early=killed, over=True))
    assert board.look(2).failed
    verdict = board.put(0, ended=Ended(over=True)).look(3).verdict
    assert verdict and verdict.code == CUT_SHORT and verdict.early == killed


def test_ranks_that_save_are_not_ended_by_a_node_that_has_saved():
    board = (
        Board().running().put(1, ended=Ended(early=EarlyExit(STOPPED, 7, "SIGTERM to rank 0", 0)))
    )
    assert not board.look(2).failed


@pytest.mark.parametrize(("completed", "code", "lost"), [(4, STOPPED, 0), (6, CUT_SHORT, 2)])
def test_a_failure_after_a_request_leaves_a_run_to_start_again(completed, code, lost):
    verdict = after(replace(ERROR, step=None), [], 3, SAVED, completed, "SIGTERM to the launcher")
    assert verdict.code == code and verdict.early == EarlyExit(
        code, completed, "SIGTERM to the launcher", lost
    )


# ---------------------------------------------------------------- what follows a failure


def test_what_would_fail_again_is_not_restarted():
    def code(failed: Failure, earlier: list[Failure], max_restarts: int = 3) -> int | None:
        return after(failed, earlier, max_restarts, SAVED, 6).code

    assert code(ERROR, []) is None and code(KILL, [KILL, KILL]) is None
    assert code(ERROR, [failure(8, "ValueError: x"), failure(7, "ValueError: y")]) is None
    assert code(ERROR, [KILL], 0) == FAILED, "as without checkpoints"
    for earlier, most in (([], 0), ([KILL] * 3, 3), ([ERROR], 3)):
        asked = after(ERROR, earlier, most, SAVED, 6, "SIGTERM to rank 0")
        assert asked.code == CUT_SHORT and asked.failure == ERROR, (
            "a request comes before the budget"
        )
    assert code(failure(7, "UserError: x", is_user_error=True, code=2), []) == 2
    assert code(failure(None, "x"), [failure(None, "x")]) is None, "the same step is not known"
    again = after(ERROR, [ERROR, KILL], 3, SAVED, 6)
    assert (
        again.code == FAILED
        and again.why == "not restarted: step 7 failed before, with the same words"
    )
    spent = after(ERROR, [KILL, KILL, KILL], 3, SAVED, 6)
    assert spent.code == GIVEN_UP and spent.why == "given up: fault.max_restarts = 3"


def test_a_restart_says_what_is_lost_and_resumes_only_what_this_run_saved():
    verdict = after(ERROR, [KILL], 3, SAVED, 5)
    assert verdict.why == "restart 2 of 3, from here/step-4; 1 step lost"
    assert verdict.resumes and verdict.first_step == 5
    verdict = after(ERROR, [], 3, Saved(), 0)
    assert verdict.why == "restart 1 of 3, from the start: nothing was saved yet; 0 steps lost"
    assert not verdict.resumes and verdict.first_step == 1


def test_a_new_checkpoint_starts_the_count_of_restarts_again():
    """SAVED is step 4: failures since then count, up to 24 of any kind within a day."""
    before, since = replace(KILL, saved_step=2), KILL
    verdict = after(ERROR, [before, before, before, since], 3, SAVED, 5)
    assert verdict.code is None and verdict.why.startswith("restart 2 of 3, "), verdict.why
    assert after(ERROR, [before, since, since, since], 3, SAVED, 5).code == GIVEN_UP
    many = after(ERROR, [before] * 24, 3, SAVED, 5)
    assert many.code == GIVEN_UP and many.why == "given up: 24 restarts within a day"
    tomorrow = replace(ERROR, time=ERROR.time + 86401)
    assert after(tomorrow, [before] * 24, 3, SAVED, 5).code is None


def test_failures_are_kept_with_the_checkpoint_that_they_came_after():
    steps = iter(range(1, 9))
    board, now = Board(saved=lambda: replace(SAVED, step=next(steps))), 0.0
    for attempt in range(1, 9):
        now += 10
        board.running(attempt, now)
        for node in range(2):
            board.put(node, ended=Ended(replace(KILL, step=attempt), over=True))
        assert board.look(now + 1).attempt == attempt + 1


def test_the_budget_of_restarts_is_spent_over_attempts():
    board, now = Board(), 0.0
    for attempt in range(1, 5):
        now += 10
        board.running(attempt, now)
        for node in range(2):
            board.put(node, ended=Ended(replace(KILL, step=attempt), over=True))
        board.look(now + 1)
    verdict = board.decider.decision.verdict
    assert verdict and verdict.code == GIVEN_UP and board.decider.decision.attempt == 4


# ---------------------------------------------------------------- a hang


def hung(tmp_path: Path) -> Board:
    board = Board(folder=tmp_path).running()
    for node in range(2):
        board.put(node, beats={2 * node + local: BEAT for local in range(2)})
    for now in range(2, 13):
        decision = board.look(now)
        assert decision.hangs == (now == 12) and not decision.failed
    return board


def test_ranks_that_do_not_move_are_inspected_and_then_the_report_is_the_failure(tmp_path):
    board = hung(tmp_path).put(0, found={0: Inspection("sleeping"), 1: Inspection("sleeping")})
    board.put(1, ended=Ended(KILL, over=True))
    assert not board.look(13).failed, "ranks may die while their stacks are taken"
    board.put(1, found={2: Inspection("stopped"), 3: Inspection("sleeping")})
    decision = board.look(14)
    assert (
        decision.failed and "rank 2: stopped" in decision.report and "hang-1.txt" in decision.report
    )
    verdict = board.put(0, ended=Ended(over=True)).look(15).verdict
    assert (
        verdict
        and verdict.failure
        and verdict.failure.text == decision.report
        and verdict.code is None
    )
    assert (
        verdict.failure.words.startswith("the run hangs: no rank moved for 10 s")
        and (tmp_path / "logs/hang-1.txt").exists()
    )


def test_a_hang_is_reported_without_a_node_that_does_not_inspect_its_ranks(tmp_path):
    board = hung(tmp_path)
    assert not board.look(19.9).report
    assert "the run hangs" in board.look(20.1).report


def test_the_next_attempt_is_watched_anew(tmp_path):
    board = hung(tmp_path)
    board.look(20.1)
    for node in range(2):
        board.put(node, ended=Ended(over=True), found={})
    board.look(21)
    board.running(2, 22.0)
    assert not board.look(23).hangs


# ---------------------------------------------------------------- what is sent


def test_a_status_and_a_decision_are_read_as_they_were_written():
    early = EarlyExit(STOPPED, 7, "SIGTERM tö rank 0", 0)
    found = {0: Inspection("stopped", "a\nstack"), 1: Inspection()}
    status = Status(
        2, 9, 3, 2, {0: BEAT}, "Ctrl-C", Ended(ERROR, early, over=True), found, True, False
    )
    assert parse(Status, dump(status).encode()) == status
    decision = Decision(
        2, (0, 2), True, "Ctrl-C", True, "report", True, after(ERROR, [], 3, SAVED, 5)
    )
    assert parse(Decision, dump(decision).encode()) == decision
