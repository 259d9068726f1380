"""A deep model is planned from rehearsals of two shallow ones where that gives the same step, as
test_random.py compares; others are rehearsed whole.
"""

import pytest

from tests.jobs import TINY, job
from tests.lanes import sample
from tests.planner.steps import plan_step, summed
from titanlite.config.job import Job
from titanlite.planner import depth
from titanlite.planner.record import add_up
from titanlite.planner.rehearse import record_step, rehearse

EVERY_SECOND = (
    "--activation_checkpoint.mode=selective --activation_checkpoint.selective_ac_option=2"
)


def of_depth(layers: int, flags: str) -> Job:
    return job([*TINY, f"--model.overrides.n_layers={layers}", *flags.split()], 2)


PREFETCHES = "--parallelism.fsdp_forward_prefetch=0 --parallelism.fsdp_backward_prefetch=2"


@pytest.mark.parametrize(
    ("flags", "layers"),
    sample([(PREFETCHES, 9), (EVERY_SECOND, 15)], nightly=[(EVERY_SECOND, 15)]),
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
    plan_step(of_depth(layers, flags))
    assert len(rehearsed) == 2 and max(rehearsed) < layers


@pytest.mark.long
@pytest.mark.parametrize(
    "planned",
    [
        of_depth(2, "--training.global_batch_size=20 --training.loss_chunks=4"),
        of_depth(6, "--model.freeze=['layers.4.*']"),
        of_depth(8, "--activation_checkpoint.mode=full --training.seq_len=8"),
    ],
    ids=["five micro-batches", "blocks that differ", "fullest in the backward pass of block 1"],
)
def test_other_models_and_any_number_of_micro_batches_are_planned_as_exactly(planned):
    assert summed(plan_step(planned)) == summed(add_up(record_step(planned)))
