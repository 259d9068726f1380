"""Where a rank is: the phases of a step, their limits, and what it tells the launchers."""

import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from titanlite.config.schema import JobConfig, config_of
from titanlite.fault.beat import Heart, phase_limit
from titanlite.fault.hang import beat_key
from titanlite.fault.stall import Beat
from titanlite.runtime.cluster import RankInfo
from titanlite.runtime.distributed import attempt_store
from titanlite.runtime.page import OWN_PAGE, Page, phase
from titanlite.runtime.rank_files import STOP


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
    ],
)
def test_each_phase_has_its_limit(step, phase, stall, limit):
    config = config_of({"fault.stall_seconds": stall})
    assert phase_limit(config, Page(step=step, phase=phase, first_step=8))[0] == limit


def test_a_rank_tells_the_launchers_where_it_is_and_hears_that_it_should_stop():
    launchers = dist.TCPStore("localhost", 0, is_master=True, timeout=timedelta(seconds=20))
    environ = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(launchers.port)}
    heard: list[str] = []
    heart = Heart(JobConfig(), RankInfo(1, 2, 1, "here"), environ, heard.append)
    with phase("backward"):
        heart.start()
        beat = Beat.parse(attempt_store(launchers, "0").get(beat_key(1)))
        assert (beat.phase, beat.host, beat.limit) == ("backward", "here", 300)
    launchers.set(STOP, "SIGTERM")
    deadline = time.monotonic() + 20
    while not heard and time.monotonic() < deadline:
        time.sleep(0.05)
    heart.end()
    heart.join(20)
    assert heard[:1] == ["SIGTERM"] and not heart.is_alive()
