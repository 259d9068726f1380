"""The phases of a step and their limits, and a rank's sign of life."""

import os
from collections.abc import Mapping
from datetime import timedelta

import pytest
import torch.distributed as dist

from titanlite.config.schema import JobConfig, config_of
from titanlite.fault.beat import Heart, beat_of, longest_limit, phase_limit
from titanlite.fault.board import Board, Link, open_board
from titanlite.fault.inspection import wait_until
from titanlite.fault.stall import ENDED
from titanlite.fault.status import Decision, Inspection, Status
from titanlite.runtime.cluster import RankInfo
from titanlite.runtime.page import OWN_PAGE, Page, phase, read_page
from titanlite.runtime.rank_files import LAUNCHED, RESOLVED_CONFIG, STOP


def test_a_phase_ends_in_the_one_around_it_and_an_error_keeps_it():
    before, count = OWN_PAGE.phase, OWN_PAGE.sequence
    with phase("validation"):
        with phase("forward"):
            assert OWN_PAGE.phase == "forward"
        assert OWN_PAGE.phase == "validation"
        with pytest.raises(ZeroDivisionError), phase("backward"):
            raise ZeroDivisionError
        assert OWN_PAGE.phase == "backward"
    assert OWN_PAGE.phase == before and OWN_PAGE.sequence == count + 3


@pytest.mark.parametrize(
    ("step", "phase", "stall", "limit"),
    [
        (0, "start", 3, 300),
        (0, "load", 3, 1800),
        (8, "forward", 3, 300),  # the first step of this process compiles
        (9, "forward", 0, 100),
        (9, "forward", 3, 3),
        (9, "data", 0, 100),
        (9, "data", 3, 3),
        (9, "save", 3, 1800),
        (9, "validation", 3, 300),  # its graphs are compiled in the first one
    ],
)
def test_each_phase_has_its_limit(step, phase, stall, limit):
    config = config_of({"fault.stall_seconds": stall})
    assert phase_limit(config, Page(step=step, phase=phase, first_step=8))[0] == limit


@pytest.mark.parametrize("validates", [True, False])
def test_collectives_wait_longer_than_any_phase_of_a_step(validates):
    config = config_of({"validation.enable": validates, "generate.at_end": False})
    phases = ["data", "forward", "log", *["validation"] * validates]
    limits = [phase_limit(config, Page(step=9, phase=each, first_step=8))[0] for each in phases]
    assert longest_limit(config) == max(limits) == (300 if validates else 100)


def test_a_launched_rank_shows_where_it_is_and_learns_that_it_should_stop(tmp_path, monkeypatch):
    environ = {
        LAUNCHED: str(os.getppid()),
        RESOLVED_CONFIG: str(tmp_path / "config.toml"),
        "RANK": "1",
    }
    learned: list[str] = []
    heart = Heart(
        JobConfig(), RankInfo(1, 2, 1, "here"), environ, learned.append, lambda: "SIGTERM: rank 1"
    )
    monkeypatch.setattr(OWN_PAGE, "_file", None)
    OWN_PAGE.share(tmp_path / "1.page")
    with phase("backward"):
        heart.start()
        wait_until(lambda: bool((page := read_page(tmp_path / "1.page")) and page.heartbeat), 20)
        page = read_page(tmp_path / "1.page")
    assert page and (page.phase, page.asked) == ("backward", "SIGTERM: rank 1")
    beat = beat_of(JobConfig(), page, "here")
    assert (beat.phase, beat.host, beat.limit, beat.pid) == ("backward", "here", 300, os.getpid())
    (tmp_path / STOP).write_text("Ctrl-C")
    wait_until(lambda: bool(learned), 20)
    heart.end()
    assert learned[:1] == ["Ctrl-C"] and not heart.is_alive()
    page = read_page(tmp_path / "1.page")
    assert page and page.phase == ENDED


def test_ranks_without_a_launcher_share_a_board_on_which_rank_0_decides():
    store = dist.TCPStore("localhost", 0, is_master=True, timeout=timedelta(seconds=20))
    link = Link("localhost", store.port)
    link.ask(lambda each: open_board(each, 2), 5)
    seen: list[dict[int, Status]] = []

    def decide(statuses: Mapping[int, Status], now: float) -> Decision:
        seen.append(dict(statuses))
        hangs = len(statuses) == 2
        done = all(status.found is not None for status in statuses.values())
        return Decision(hangs=hangs, report="it hangs" if hangs and done else "")

    found = {1: Inspection("stopped")}
    boards = []
    for number, judge in ((0, decide), (1, None)):
        link = Link("localhost", store.port)
        boards.append(Board(link, number, 2, Status(), lambda own: own, lambda: found, judge, 0.05))
    for board in boards:
        board.start()
    wait_until(lambda: all(board.decision.report for board in boards), 20)
    for board in boards:
        board.end()
    assert [board.decision.report for board in boards] == ["it hangs", "it hangs"]
    assert seen[-1][1].found == found
