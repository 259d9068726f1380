"""A kill -9 at any moment of a save loses no more than that save, and the next start resumes by
itself.

The rounds of one run, each killed at another point; scripts/soak_checkpoint.py runs 200 of them.
"""

from dataclasses import replace

import pytest

from tests.failpoints import FAILPOINTS, ON_EVERY_RANK
from tests.faults.rounds import Plan, Soak, planned, watched
from tests.lanes import sample


@pytest.fixture(scope="module")
def soak(tmp_path_factory):
    folder = tmp_path_factory.mktemp("soak") / "run"
    folder.mkdir()
    yield from watched(Soak(folder))


@pytest.mark.parametrize("point", sample(FAILPOINTS, every=2))
def test_after_a_kill_in_a_save_the_newest_committed_step_is_resumed(soak, point):
    on_rank = int(point in ON_EVERY_RANK)
    assert soak.round(Plan("async", on_rank, point, save=1, seconds=0)) == ""


@pytest.mark.long
@pytest.mark.parametrize("number", [3, 7, 11])
def test_a_kill_at_a_random_moment_costs_no_more_than_an_interval(soak, number):
    assert (
        soak.round(replace(planned(1, number), mode="disabled" if number == 7 else "async")) == ""
    )


@pytest.mark.long
def test_after_all_kills_the_run_equals_one_that_was_never_killed(soak):
    assert soak.finish() == []
