"""A pipeline is planned from few micro-batches, few blocks and ranks of each kind: each rank's step
is the one that a rehearsal of the whole gives, at every operation.
"""

import pytest

from tests.jobs import MOE, TINY, job
from tests.lanes import sample
from titanlite.config.job import Job
from titanlite.planner.depth import plan_ranks
from titanlite.planner.pipeline import shortened
from titanlite.planner.rehearse import record_step

KEYS = "--parallelism.pipeline_parallel_"
TWO = ["2 1F1B 6 4", "2 Interleaved1F1B 8 9", "2 InterleavedZeroBubble 8 8", "2 DualPipeV 9 8"]
FOUR = ["4 GPipe 5 5", "4 1F1B 9 28", "4 Interleaved1F1B 16 18", "4 LoopedBFS 5 9"]
V_SHAPED = ["2 ZBVZeroBubble 8 8", "4 ZBVZeroBubble 9 17", "4 DualPipeV 12 17"]
SCHEDULES = [*TWO, *FOUR, *V_SHAPED]
"""Ranks, schedule, micro-batches and blocks, which some stages have one more of."""
TECHNIQUES = [
    ("2 1F1B 5 13", 2, "--parallelism.tensor_parallel_degree=2 --model.overrides.n_kv_heads=2"),
    ("2 Interleaved1F1B 8 28", 2, "--training.mixed_precision_param=bfloat16"),
    ("2 Interleaved1F1B 6 8", 2, "--activation_checkpoint.mode=full"),
    ("2 GPipe 7 20", 2, "--activation_checkpoint.mode=selective --training.loss_chunks=2"),
    ("2 1F1B 7 19", 2, "--parallelism.fsdp_blocks_per_group=2"),
    ("3 1F1B 5 9", 2, "--parallelism.fsdp_reshard_after_forward=always"),
    ("3 1F1B 7 20", 3, "--optimizer.name=SGD"),
    ("3 Interleaved1F1B 6 12", 2, "--optimizer.name=Muon"),
    ("2 1F1B 5 13", 2, "--compile.enable"),
    ("2 1F1B 6 16", 2, "--parallelism.context_parallel_degree=2"),
    ("2 Interleaved1F1B 6 8", 1, f"{KEYS}layers_per_stage=1 {KEYS}first_stage_less_layers=0 "
     f"{KEYS}last_stage_less_layers=0"),
]  # fmt: skip
"""The same, ranks of each stage and further flags."""


def pipelined(shape: str, more: str = "", size: int = 1, base: list[str] = TINY) -> Job:
    ranks, schedule, micro_batches, layers = shape.split()
    own = [f"{KEYS}degree={ranks}", f"{KEYS}schedule={schedule}", f"{KEYS}microbatch_size=1"]
    own += [f"--training.local_batch_size={micro_batches}", f"--model.overrides.n_layers={layers}"]
    return job([*base, *own, *more.split()], int(ranks) * size)


def assert_equal_to_the_whole(planned: Job) -> None:
    size = planned.layout.world // planned.layout.pp
    for rank, recording in enumerate(plan_ranks(planned)):
        assert recording == record_step(planned, rank * size), f"rank {rank}"


SCHEDULES_IN_CI = ["2 Interleaved1F1B 8 9"]


@pytest.mark.parametrize("shape", sample(SCHEDULES, "2 1F1B 6 4", long=SCHEDULES_IN_CI))
def test_few_micro_batches_give_any_number_on_every_rank(shape):
    planned = pipelined(shape)
    assert shortened(planned) != planned
    assert_equal_to_the_whole(planned)


@pytest.mark.parametrize(
    ("shape", "size", "more"), sample(TECHNIQUES, TECHNIQUES[2], long=TECHNIQUES[:1])
)
def test_few_blocks_and_micro_batches_give_a_deep_pipeline(shape, size, more):
    assert_equal_to_the_whole(pipelined(shape, more, size))


@pytest.mark.exhaustive
def test_few_blocks_and_micro_batches_give_a_deep_pipeline_of_experts():
    more = "--parallelism.expert_parallel_degree=2 --activation_checkpoint.mode=full"
    assert_equal_to_the_whole(pipelined("2 1F1B 6 15", more, 2, MOE))


def test_405b_on_8_ranks_needs_3_of_its_32_micro_batches():
    stages = shortened(pipelined("8 Interleaved1F1B 32 126")).stages
    assert stages.micro_batches == 3
