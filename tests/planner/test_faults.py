"""A mistake in the code that trains shows in the plan: the bytes of the peak or a collective of its
row change.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.lanes import sample
from titanlite.planner.record import Collective
from titanlite.planner.rehearse import record_step
from titanlite.verify.known_faults import Fault
from titanlite.verify.model_under_test import build_job
from titanlite.verify.plan_check import PlanRow, command_line, row

KEPT: list[Any] = []
"""What a fault does not let go."""


def twice(original, *arguments, **options):
    original(*arguments, **options)
    return original(*arguments, **options)


def never(*arguments, **options):
    return False


def always(*arguments, **options):
    return True


def keep_inputs(forward, stage, *arguments, **options):
    KEPT.append(arguments)
    return forward(stage, *arguments, **options)


def place_at_once(place, buffers, device):
    if device != "meta":
        place(buffers, device)


def send_twice(get_fwd_send_ops, stage, number):
    return get_fwd_send_ops(stage, number) + get_fwd_send_ops(stage, number)


def attend_in_float64(attend, mesh, own_chunks, core, q, k, v, *rest):
    wide = [each.double() for each in (q, k, v)]
    return attend(mesh, own_chunks, core, *wide, *rest).to(q.dtype)


PIPELINE, DATA, EXPERTS = row("pp2"), row("dp2"), row("ep2", model="mixture")
WHOLE = row("dp2", more=["--parallelism.fsdp_keep_whole=['*norm*']"])
FAULTS = {  # what happens: the function that is replaced, its replacement, the row that shows it
    "no group is freed after its forward pass": (
        "parallel.fsdp._reshard",
        never,
        DATA,
    ),
    "experts are gathered again for the backward pass": (
        "parallel.fsdp._reshard",
        always,
        row("ep2", model="mixture", accumulation="3"),
    ),
    "gathers do not go ahead": (
        "parallel.fsdp_schedule.set_prefetch",
        never,
        row("dp2", prefetch="2"),
    ),
    "a stage keeps its inputs": (
        "parallel.stage.Stage.forward_maybe_with_nosync",
        keep_inputs,
        PIPELINE,
    ),
    "receive buffers live too long": ("parallel.stage._place", place_at_once, PIPELINE),
    "a stage sends twice": ("parallel.stage.Stage.get_fwd_send_ops", send_twice, PIPELINE),
    "the state stays in float32": (
        "optim.bf16_state._is_state_tensor",
        never,
        row("dp2", more=["--optimizer.state_dtype=bfloat16"]),
    ),
    "keys and values are gathered as float64": (
        "parallel.context_parallel._attend_to_all_tokens",
        attend_in_float64,
        row("cp2"),
    ),
    "counts are sent twice": ("parallel.expert_parallel.send_rows", twice, EXPERTS),
    "gradients are summed twice": ("parallel.replicated.sum_gradients", twice, WHOLE),
    "tied gradients are swapped twice": (
        "parallel.pipeline_parallel.Pipeline.sum_tied_gradients",
        twice,
        row("pp2", variant="tied"),
    ),
}


def plan_of(plan_row: PlanRow, folder: Path) -> list[tuple[int, Counter[Collective]]]:
    """Return the peak and the collectives of the first and last rank."""
    world = plan_row.row.mesh.world
    job = build_job(command_line(plan_row, folder), world)
    plans = [record_step(job, rank, as_on_cuda=False) for rank in (0, world - 1)]
    return [(plan.peak, plan.collectives()) for plan in plans]


@pytest.fixture(scope="module")
def right_plan(tmp_path_factory):
    """Return a function that plans the row of a fault without it, once."""
    rows = {str(plan_row): plan_row for _, _, plan_row in FAULTS.values()}
    planned = cache(lambda words: plan_of(rows[words], tmp_path_factory.mktemp("right")))
    return lambda plan_row: planned(str(plan_row))


@pytest.mark.parametrize("name", sample(FAULTS, "no group is freed after its forward pass"))
def test_a_fault_changes_the_plan_of_its_row(name, right_plan, tmp_path):
    target, replacement, plan_row = FAULTS[name]
    right = right_plan(plan_row)
    with Fault("", f"titanlite.{target}", (), replacement).put_in():
        wrong = plan_of(plan_row, tmp_path)
    KEPT.clear()
    assert wrong != right
