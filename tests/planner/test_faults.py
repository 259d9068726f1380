"""A mistake in the code that trains shows in the plan: the bytes of the peak or a collective of its
row change.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.parity.known_faults import Fault
from tests.planner.plan_check import PlanRow, command_line, row
from titanlite.planner.record import Collective
from titanlite.planner.rehearse import record_step
from titanlite.verify.model_under_test import build_job


def twice(original, *arguments, **options):
    original(*arguments, **options)
    return original(*arguments, **options)


def never(*arguments, **options):
    return False


def place_at_once(place, buffers, device):
    if device != "meta":
        place(buffers, device)


FAULTS = {  # what happens: the function that is replaced, its replacement, the row that shows it
    "no group is freed after its forward pass": ("parallel.fsdp._reshard", never, row("dp2")),
    "gathers do not go ahead": (
        "parallel.fsdp_schedule.set_prefetch",
        never,
        row("dp2", prefetch="2"),
    ),
    "receive buffers live too long": ("parallel.stage._place", place_at_once, row("pp2")),
    "the state stays in float32": (
        "optim.bf16_state._is_state_tensor",
        never,
        row("dp2", more=["--optimizer.state_dtype=bfloat16"]),
    ),
    "counts are sent twice": (
        "parallel.expert_parallel.send_rows",
        twice,
        row("ep2", model="mixture"),
    ),
    "gradients are summed twice": (
        "parallel.replicated.GradientSum._sum_vectors",
        twice,
        row("dp2", more=["--parallelism.fsdp_keep_whole=['*norm*']"]),
    ),
}


def plan_of(plan_row: PlanRow, folder: Path) -> list[tuple[int, Counter[Collective]]]:
    """Return the peak and the collectives of the first and last rank."""
    world = plan_row.row.mesh.world
    job = build_job(command_line(plan_row, folder), world)
    plans = [record_step(job, rank, as_on_cuda=False) for rank in (0, world - 1)]
    return [(plan.peak, plan.collectives()) for plan in plans]


@pytest.mark.nightly
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_changes_the_plan_of_its_row(name, tmp_path):
    target, replacement, plan_row = FAULTS[name]
    right = plan_of(plan_row, tmp_path)
    with Fault(f"titanlite.{target}", (), replacement).put_in():
        wrong = plan_of(plan_row, tmp_path)
    assert wrong != right
