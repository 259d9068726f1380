"""The phases of a step and their limits."""

import pytest
import torch.distributed as dist

from titanlite.config.schema import config_of
from titanlite.fault.beat import longest_limit, phase_limit
from titanlite.fault.board import Board, Link, open_board
from titanlite.fault.status import Decision, Status
from titanlite.runtime.page import OWN_PAGE, Page, phase


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


def test_a_board_that_is_ended_waits_for_one_exchange_and_no_longer():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    open_board(store, 1)
    link = Link("127.0.0.1", store.port, store=store)
    board = Board(link, 0, 1, Status(), lambda own: own, dict, lambda *_: Decision(), interval=1e6)
    board.start()
    board.end()
    assert not board.is_alive() and board.exchanges


@pytest.mark.parametrize("validates", [True, False])
def test_collectives_wait_longer_than_any_phase_of_a_step(validates):
    config = config_of({"validation.enable": validates, "generate.at_end": False})
    phases = ["data", "forward", "log", *["validation"] * validates]
    limits = [phase_limit(config, Page(step=9, phase=each, first_step=8))[0] for each in phases]
    assert longest_limit(config) == max(limits) == (300 if validates else 100)
