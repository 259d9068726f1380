"""What is rehearsed is what real processes do: the bytes of the peak, and every collective."""

from collections import Counter
from contextlib import ExitStack, closing
from functools import cache

import pytest

from tests.jobs import MOE, TINY, job
from tests.lanes import sample
from tests.messages import refused
from tests.planner.plan_check import ROWS, check, missing_gathers
from tests.planner.steps import plan_step
from tests.worker import PRELOAD
from titanlite.models.common.feed_forward import SwiGLU
from titanlite.planner.record import Collective
from titanlite.planner.rehearse import record_step, static_bytes
from titanlite.verify.pool import Pool

TENSOR = ROWS[6]
REPLICAS = [one for one in ROWS if one.row.layout == "replicate2 x tp2"]
COMPILED = [one for one in ROWS if one.row.compile != "off" and one.row.sequence == "ulysses"]
LONG = [TENSOR, *REPLICAS, *COMPILED]
ALL_ROWS = sample(ROWS, long=LONG, nightly=[one for one in ROWS if one not in LONG])


@pytest.fixture(scope="module")
def pool_of(pool):
    """Return the pool for a number of ranks: the one of all tests, or one of eight."""
    with ExitStack() as stack:
        large = cache(lambda: stack.enter_context(closing(Pool(8, PRELOAD))))
        yield lambda world: pool if world <= pool.size else large()


@pytest.mark.parametrize("plan_row", ALL_ROWS, ids=str)
def test_a_rehearsal_equals_real_processes_to_the_byte(plan_row, pool_of, tmp_path):
    assert not check(plan_row, tmp_path, pool_of(plan_row.row.mesh.world))


def test_a_gather_too_many_is_named_with_its_dimension():
    one = Collective("all-gather", "tp", 2, "float32", 64)
    assert missing_gathers(TENSOR.gathers, Counter({one: 18})) == []
    (found,) = missing_gathers(TENSOR.gathers, Counter({one: 22}))
    assert found.startswith("22 all-gathers on tp")


def test_a_converter_of_a_package_is_refused_by_name():
    with refused("not planned: model.converters"):
        plan_step(job([*TINY, "--model.converters=['louder']", "--model.package=louder"], 2))


def test_an_operation_that_needs_values_is_named_with_its_module(monkeypatch):
    monkeypatch.setattr(SwiGLU, "forward", lambda self, x: x * x.sum().item())
    with refused("not planned: aten._local_scalar_dense", "0.feed_forward"):
        record_step(job(TINY, 1))


@pytest.mark.long
def test_the_fullest_rank_receives_so_many_times_the_mean_for_its_experts():
    mixture = job([*MOE, "--parallelism.expert_parallel_degree=2", "--training.seq_len=64"], 2)
    once, twice = plan_step(mixture), plan_step(mixture, imbalance=2)
    received = []
    for plan in (once, twice):
        sizes = (n for one, n in plan.sent.items() if one.kind == "all-to-all")
        received.append(max(sizes))
    assert received[1] > 1.4 * received[0] and twice.peak > once.peak


def test_static_bytes_of_the_skeleton_are_those_of_a_step():
    options = ["--parallelism.fsdp_keep_whole=['*norm*']", "--model.overrides.vocab_size=257"]
    kept = job([*TINY, *options], 2)
    counted, found = record_step(kept).static, static_bytes(kept)
    steps = 4 * 21  # Adam's count of steps, a float32 for each parameter
    assert found == {**counted, "optimizer": counted["optimizer"] - steps}
