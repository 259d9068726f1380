"""A mistake in the code that trains shows in the plan: the bytes of the peak or a collective of its
row change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.lanes import sample
from titanlite.planner.record import Collective
from titanlite.planner.rehearse import record_step
from titanlite.verify.known_faults import Fault
from titanlite.verify.model_under_test import build_job
from titanlite.verify.plan_check import PlanRow, command_line, row

FAULTS: dict[str, tuple[PlanRow, Fault]] = {}
KEPT: list[Any] = []
"""What a fault does not let go."""


def put(
    name: str, replacement: Callable[..., Any], target: str, layout: str, **columns: Any
) -> None:
    """Register the replacement of a function, and the row that shows it."""
    FAULTS[name] = row(layout, **columns), Fault("", f"titanlite.{target}", (), replacement)


def fault(target: str, layout: str, **columns: Any) -> Callable[[Callable[..., Any]], Any]:
    """Register the decorated replacement of a function."""

    def register(replacement: Callable[..., Any]) -> Callable[..., Any]:
        put(replacement.__name__, replacement, target, layout, **columns)
        return replacement

    return register


def twice(original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    original(*arguments, **options)
    return original(*arguments, **options)


def put_twice(name: str, target: str, layout: str, **columns: Any) -> None:
    """Register the fault that a function does its work twice."""
    put(name, twice, target, layout, **columns)


@fault("parallel.stage.Stage.forward_maybe_with_nosync", "pp2")
def a_stage_keeps_its_inputs(forward, stage, *arguments, **options):
    KEPT.append(arguments)
    return forward(stage, *arguments, **options)


@fault("parallel.stage._place", "pp2")
def receive_buffers_live_too_long(place, buffers, device):
    if device != "meta":
        place(buffers, device)


@fault("parallel.stage.Stage.get_fwd_send_ops", "pp2")
def a_stage_sends_twice(get_fwd_send_ops, stage, number):
    return get_fwd_send_ops(stage, number) + get_fwd_send_ops(stage, number)


@fault("parallel.fsdp._reshard", "ep2", model="mixture", accumulation="3")
def experts_are_gathered_again_for_the_backward_pass(reshard, job, is_last):
    return True


@fault("parallel.fsdp._reshard", "dp2")
def no_group_is_freed_after_its_forward_pass(reshard, job, is_last):
    return False


@fault("optim.bf16_state._is_state_tensor", "dp2", more=["--optimizer.state_dtype=bfloat16"])
def the_state_stays_in_float32(is_state_tensor, value):
    return False


@fault("parallel.context_parallel._attend_to_all_tokens", "cp2")
def keys_and_values_are_gathered_as_float64(attend, mesh, own_chunks, core, q, k, v, *rest):
    wide = [each.double() for each in (q, k, v)]
    return attend(mesh, own_chunks, core, *wide, *rest).to(q.dtype)


@fault("parallel.fsdp_schedule.set_prefetch", "dp2", prefetch="2")
def gathers_do_not_go_ahead(set_prefetch, groups, plan):
    pass


MIXTURE = {"model": "mixture"}
put_twice("keys_and_values_are_gathered_twice", "parallel.context_parallel._attend_to_all_tokens",
          "cp2")  # fmt: skip
put_twice("heads_are_exchanged_twice", "parallel.context_parallel._attend_to_some_heads", "cp2",
          sequence="ulysses")  # fmt: skip
put_twice("counts_are_sent_twice", "parallel.expert_parallel.send_rows", "ep2", **MIXTURE)
put_twice("tokens_are_sent_twice", "parallel.expert_parallel._dispatch", "ep2", **MIXTURE)
put_twice(
    "gradients_of_whole_parameters_are_summed_twice",
    "parallel.replicated.sum_gradients",
    "dp2",
    more=["--parallelism.fsdp_keep_whole=['*norm*']"],
)
put_twice("valid_tokens_are_counted_twice", "train.guard.StepGuard.exchange", "dp2")
put_twice("the_norm_is_taken_twice", "train.step.StepRunner.clip_gradients", "dp2")
put_twice("tied_gradients_are_swapped_twice",
          "parallel.pipeline_parallel.Pipeline.sum_tied_gradients", "pp2",
          variant="tied")  # fmt: skip


def plan_of(plan_row: PlanRow, folder: Path) -> list[tuple[int, Counter[Collective]]]:
    """Return the peak and the collectives of the first and last rank."""
    world = plan_row.row.mesh.world
    job = build_job(command_line(plan_row, folder), world)
    plans = [record_step(job, rank, as_on_cuda=False) for rank in (0, world - 1)]
    return [(plan.peak, plan.collectives()) for plan in plans]


QUICK = "no_group_is_freed_after_its_forward_pass", "counts_are_sent_twice"


@pytest.mark.parametrize("name", sample(FAULTS, *QUICK, long=["gathers_do_not_go_ahead"]))
def test_a_fault_changes_the_plan_of_its_row(name, tmp_path):
    plan_row, mistake = FAULTS[name]
    right = plan_of(plan_row, tmp_path)
    try:
        with mistake.put_in():
            assert plan_of(plan_row, tmp_path) != right
    finally:
        KEPT.clear()
    assert plan_of(plan_row, tmp_path) == right
