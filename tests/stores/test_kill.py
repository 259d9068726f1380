"""A kill -9 at any moment of a save into a bucket loses no more than that save, and the next start
resumes by itself.
"""

from collections.abc import Callable, Iterator

import pytest

from tests.failpoints import FAILPOINTS, ON_EVERY_RANK
from tests.faults.rounds import Bucket, Plan, Soak, planned, watched
from tests.stores.server import BUCKET, using
from titanlite.runtime.store import LocalPath

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def soak(tmp_path_factory: pytest.TempPathFactory, port_of: Callable[[str], int]) -> Iterator[Soak]:
    folder = LocalPath(tmp_path_factory.mktemp("soak"), "run")
    folder.mkdir()
    with using(port_of("s3")):
        yield from watched(Soak(folder, bucket=Bucket(f"s3://{BUCKET}/soak", port_of("s3"))))


@pytest.mark.parametrize("point", FAILPOINTS[::4])
def test_after_a_kill_in_a_save_the_newest_committed_step_is_resumed(soak, point):
    save = 2 if point == FAILPOINTS[0] else 1
    assert soak.round(Plan("async", int(point in ON_EVERY_RANK), point, save, seconds=0)) == ""


def test_a_kill_at_a_random_moment_costs_no_more_than_an_interval(soak):
    assert soak.round(planned(1, 7)) == ""


def test_after_all_kills_the_run_equals_one_that_was_never_killed(soak):
    assert soak.finish() == []
