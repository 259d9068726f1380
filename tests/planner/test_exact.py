"""What is rehearsed is what real processes do: the bytes of the peak, and every collective."""

from collections import Counter
from contextlib import closing

import pytest

from tests.jobs import MOE, OUTSIDE, TINY, job
from tests.lanes import sample
from tests.planner.steps import plan_step
from titanlite.errors import UserError
from titanlite.models.common.feed_forward import SwiGLU
from titanlite.planner.record import Collective
from titanlite.planner.rehearse import record_step, static_bytes
from titanlite.verify.plan_check import ROWS, check, missing_gathers, row
from titanlite.verify.pool import Pool
from titanlite.verify.runner import PRELOAD

LAYOUTS = [one for one in ROWS[:9] if one.row.mesh.world <= 4]
MIXED = row("dp2", 11, 0, ["--training.loss_chunks=4"], precision="bfloat16", variant="frozen")
TECHNIQUES = [ROWS[9], ROWS[10], MIXED, *(one for one in ROWS[26::3] if one.row.mesh.world <= 4)]
MUON = row("dp2", 11, more=["--optimizer.name=Muon"])
CONTEXT = next(one for one in ROWS if "--training.document_mask" in one.more)
EXPERTS = row("ep2", 7, model="mixture")
ROWS_SENT = "all-to-all", "bfloat16"
PIPELINE = row("pp2", schedule="ZBVZeroBubble")
QUICK = [ROWS[6], MIXED, MUON, CONTEXT, EXPERTS, PIPELINE]


OTHERS = [one for one in [*LAYOUTS, *TECHNIQUES] if one not in QUICK]
"""With a third of the rows of techniques: `titanlite plan --selftest` has them all."""


@pytest.mark.parametrize("plan_row", sample([*QUICK, *OTHERS], *QUICK, every=16), ids=str)
def test_a_rehearsal_equals_real_processes_to_the_byte(plan_row, pool, tmp_path):
    assert not check(plan_row, tmp_path, pool)


@pytest.mark.exhaustive
def test_a_rehearsal_equals_eight_real_processes_to_the_byte(tmp_path):
    with closing(Pool(8, PRELOAD)) as eight:
        assert not check(ROWS[8], tmp_path, eight)


def test_a_gather_too_many_is_named_with_its_dimension():
    one = Collective("all-gather", "tp", 2, "float32", 64)
    assert missing_gathers(ROWS[6].gathers, Counter({one: 18})) == []
    assert missing_gathers(ROWS[6].gathers, Counter({one: 22})) == [
        "22 all-gathers on tp, expected 18"
    ]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--model.converters=['louder']", "--model.package=louder"], "model.converters"),
    ],
)
def test_what_is_not_rehearsed_is_refused_by_name(flags, named, monkeypatch):
    monkeypatch.syspath_prepend(OUTSIDE)
    with pytest.raises(UserError, match=rf"not planned: {named}"):
        plan_step(job([*TINY, *flags], 2))


def test_an_operation_that_needs_values_is_named_with_its_module(monkeypatch):
    monkeypatch.setattr(SwiGLU, "forward", lambda self, x: x * x.sum().item())
    with pytest.raises(
        UserError, match=r"not planned: aten\._local_scalar_dense\S* of \S*0.feed_forward needs"
    ):
        record_step(job(TINY, 1))


def test_the_fullest_rank_receives_so_many_times_the_mean_for_its_experts():
    mixture = job([*MOE, "--parallelism.expert_parallel_degree=2", "--training.seq_len=64"], 2)
    once, twice = plan_step(mixture), plan_step(mixture, imbalance=2)
    received = [
        max(
            one.bytes
            for one in plan.collectives()
            if one.kind == "all-to-all" and one.dtype != "int64"
        )
        for plan in (once, twice)
    ]
    assert received[1] == 2 * received[0] and twice.peak > once.peak
    assert plan_step(mixture, imbalance=1.0) == once


def test_static_bytes_of_the_skeleton_are_those_of_a_step():
    kept = job(
        [*TINY, "--parallelism.fsdp_keep_whole=['*norm*']", "--model.overrides.vocab_size=257"], 2
    )
    counted, found = record_step(kept).static, static_bytes(kept)
    steps = 4 * 21  # Adam's count of steps, a float32 for each parameter
    assert found == {**counted, "optimizer": counted["optimizer"] - steps}
