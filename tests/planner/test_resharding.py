"""What "auto" of parallelism.fsdp_reshard_after_forward stands for: "never" where the planned step
fits, to the byte.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.jobs import TINY, job
from tests.messages import says
from tests.planner.steps import H100
from titanlite.config.resharding import RESHARD
from titanlite.planner.hardware import GIB, Hardware
from titanlite.planner.plan import make_plan
from titanlite.planner.resharding import choose, kept_gathered
from titanlite.planner.tables import report

AUTO = job([*TINY, f"--{RESHARD}=auto"], 2)


def gpu_of(size: int) -> Hardware:
    """Return a GPU with this many usable bytes."""
    reserve = replace(H100.reserve, gib=0.0)
    return replace(H100, gpu=replace(H100.gpu, memory_gib=size / GIB), reserve=reserve)


@pytest.mark.long
def test_parameters_stay_gathered_if_that_fits_to_the_byte():
    assert AUTO.config == job(TINY, 2).config
    assert kept_gathered(AUTO).config == job([*TINY, f"--{RESHARD}=never"], 2).config
    kept = make_plan(AUTO, H100)
    peak = kept.totals.peak
    assert choose(AUTO, gpu_of(peak))[0] == "never"
    freed = make_plan(AUTO, gpu_of(peak - 1))
    assert freed.totals.peak < peak
    for plan, value in ((kept, "never"), (freed, "default")):
        assert plan.to_json()["job"]["resharding"] == plan.resharding
        says(report(plan), f'{RESHARD} "auto" is "{value}"', '"never" needs', '"default" it needs')
