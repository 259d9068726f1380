"""A pipeline is planned from few micro-batches, few blocks and ranks of each kind: each rank's step
has the totals that a rehearsal of the whole gives.
"""

import pytest

from tests.jobs import MOE, TINY, job
from tests.lanes import sample
from tests.planner.steps import summed
from titanlite.config.job import Job
from titanlite.planner.depth import plan_ranks
from titanlite.planner.pipeline import shortened_job
from titanlite.planner.record import add_up
from titanlite.planner.rehearse import record_step

KEYS = "--parallelism.pipeline_parallel_"
SCHEDULES = ["2 1F1B 6 4", "2 Interleaved1F1B 8 9"]
"""Ranks, schedule, micro-batches and blocks, which some stages have one more of."""


def pipelined(shape: str, more: str = "", size: int = 1, base: list[str] = TINY) -> Job:
    ranks, schedule, micro_batches, layers = shape.split()
    own = [f"{KEYS}degree={ranks}", f"{KEYS}schedule={schedule}", f"{KEYS}microbatch_size=1"]
    own += [f"--training.local_batch_size={micro_batches}", f"--model.overrides.n_layers={layers}"]
    return job([*base, *own, *more.split()], int(ranks) * size)


def assert_equal_to_the_whole(planned: Job) -> None:
    size = planned.layout.world // planned.layout.pp
    for rank, totals in enumerate(plan_ranks(planned)):
        whole = add_up(record_step(planned, rank * size))
        assert summed(totals) == summed(whole), f"rank {rank}"


@pytest.mark.parametrize("shape", sample(SCHEDULES, nightly=SCHEDULES[1:]))
def test_few_micro_batches_give_any_number_on_every_rank(shape):
    planned = pipelined(shape)
    assert shortened_job(planned) != planned
    assert_equal_to_the_whole(planned)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("shape", "base", "more"),
    [
        (
            "2 1F1B 5 13",
            TINY,
            "--parallelism.tensor_parallel_degree=2 --model.overrides.n_kv_heads=2",
        ),
        ("2 1F1B 6 15", MOE, "--parallelism.expert_parallel_degree=2"),
        # two ranks in the middle that are alike, with blocks of other numbers
        ("4 Interleaved1F1B 8 40", TINY, "--parallelism.data_parallel_shard_degree=2"),
    ],
)
def test_few_blocks_and_micro_batches_give_a_deep_pipeline(shape, base, more):
    assert_equal_to_the_whole(pipelined(shape, more, 2, base))


def test_405b_on_8_ranks_needs_3_of_its_32_micro_batches():
    stages = shortened_job(pipelined("8 Interleaved1F1B 32 126")).stages
    assert stages.micro_batches == 3
