"""A step of a deep model from rehearsals of two shallow ones: equal at every operation."""

import pytest

from tests.jobs import TINY, job
from tests.lanes import sample
from tests.planner.steps import plan_step
from titanlite.planner import depth
from titanlite.planner.rehearse import record_step, rehearse

AC = "--activation_checkpoint."
TECHNIQUES = [
    (["--training.mixed_precision_param=bfloat16", AC + "mode=selective"], 2),
    (
        [
            "--parallelism.tensor_parallel_degree=2",
            "--model.overrides.n_kv_heads=2",
            AC + "mode=full",
        ],
        4,
    ),
    (
        [
            "--parallelism.fsdp_blocks_per_group=2",
            AC + "mode=selective",
            AC + "selective_ac_option=2",
        ],
        2,
    ),
    (["--parallelism.fsdp_forward_prefetch=2", "--parallelism.fsdp_backward_prefetch=2"], 2),
]
ACCUMULATING = ["--training.global_batch_size=20", "--training.loss_chunks=4"]


@pytest.mark.parametrize(("flags", "world"), sample(TECHNIQUES, TECHNIQUES[0], every=2))
def test_two_shallow_rehearsals_give_any_depth(flags, world):
    layers = 13 if "--parallelism.fsdp_blocks_per_group=2" in flags else 7
    deep = job([*TINY, f"--model.overrides.n_layers={layers}", *flags], world)
    assert plan_step(deep) == record_step(deep)


@pytest.mark.parametrize(
    ("flags", "layers"),
    [
        (["--parallelism.fsdp_forward_prefetch=0", "--parallelism.fsdp_backward_prefetch=2"], 9),
        ([AC + "mode=selective", AC + "selective_ac_option=2"], 15),
    ],
)
def test_no_deep_model_is_rehearsed_whose_prefetches_and_periods_are_known(
    flags, layers, monkeypatch
):
    """One that did not pair off would be rehearsed whole: as exact, but not as fast."""
    rehearsed = []

    def rehearse_and_note(one, *arguments, **options):
        rehearsed.append(one.shape.layers)
        return rehearse(one, *arguments, **options)

    monkeypatch.setattr(depth, "rehearse", rehearse_and_note)
    plan_step(job([*TINY, f"--model.overrides.n_layers={layers}", *flags], 2))
    assert len(rehearsed) == 2 and max(rehearsed) < layers


def test_micro_batches_between_the_second_and_the_last_are_like_the_second():
    accumulating = job([*TINY, *ACCUMULATING], 2)
    assert accumulating.batch.accumulation == 5
    assert plan_step(accumulating) == record_step(accumulating)


@pytest.mark.long
def test_five_micro_batches_are_planned_from_three():
    deep = job([*TINY, "--model.overrides.n_layers=7", *ACCUMULATING], 2)
    assert deep.batch.accumulation == 5
    assert plan_step(deep) == record_step(deep)


def test_a_model_whose_blocks_differ_is_rehearsed_whole():
    frozen = job([*TINY, "--model.overrides.n_layers=6", "--model.freeze=['layers.4.*']"], 2)
    assert plan_step(frozen) == record_step(frozen)
