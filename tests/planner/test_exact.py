"""What is rehearsed is what real processes do: the bytes of the peak, and every collective."""

from collections import Counter
from contextlib import closing

import pytest

from tests.jobs import TINY, job
from tests.lanes import sample
from titanlite.errors import UserError
from titanlite.planner.record import Collective
from titanlite.planner.rehearse import record_step, static_bytes
from titanlite.verify.plan_check import ROWS, check, missing_gathers, row
from titanlite.verify.pool import Pool
from titanlite.verify.runner import PRELOAD

LAYOUTS = [one for one in ROWS[:9] if one.row.mesh.world <= 4]
MIXED = row("dp2", 11, 0, ["--training.loss_chunks=4"], precision="bfloat16", variant="frozen")
TECHNIQUES = [ROWS[9], ROWS[10], MIXED]


@pytest.mark.parametrize("plan_row", sample([*LAYOUTS, *TECHNIQUES], ROWS[6], MIXED), ids=str)
def test_a_rehearsal_equals_real_processes_to_the_byte(plan_row, pool, tmp_path):
    assert not check(plan_row, tmp_path, pool)


@pytest.mark.long
def test_a_rehearsal_equals_eight_real_processes_to_the_byte(tmp_path):
    with closing(Pool(8, PRELOAD)) as eight:
        assert not check(ROWS[8], tmp_path, eight)


def test_a_gather_too_many_is_named_with_its_dimension():
    one = Collective("all-gather", "tp", 2, "float32", 64)
    assert missing_gathers(ROWS[6], Counter({one: 18})) == []
    assert missing_gathers(ROWS[6], Counter({one: 22})) == ["22 all-gathers on tp, expected 18"]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--optimizer.name=Muon"], "optimizer.name = Muon"),
        (["--optimizer.state_dtype=bfloat16"], "optimizer.state_dtype = bfloat16"),
        (["--training.enable_cpu_offload"], "training.enable_cpu_offload"),
        (["--quantize.linear.float8.enable"], "quantize.linear.float8"),
        (["--model.converters=['float8']"], "quantize.linear.float8"),
        (["--parallelism.context_parallel_degree=2"], "parallelism.context_parallel_degree"),
        (["--parallelism.pipeline_parallel_degree=2"], "parallelism.pipeline_parallel_degree"),
        (["--model.name=qwen3", "--model.flavor=debugmodel_moe"], "experts"),
    ],
)
def test_what_is_not_rehearsed_is_refused_by_name(flags, named):
    with pytest.raises(UserError, match=rf"not planned: {named}"):
        record_step(job([*TINY, *flags], 2))


def test_static_bytes_of_the_skeleton_are_those_of_a_step():
    kept = job(
        [*TINY, "--parallelism.fsdp_keep_whole=['*norm*']", "--model.overrides.vocab_size=257"], 2
    )
    counted, found = record_step(kept).static, static_bytes(kept)
    steps = 4 * 21  # Adam's count of steps, a float32 for each parameter
    assert found == {**counted, "optimizer": counted["optimizer"] - steps}
