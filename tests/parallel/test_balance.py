"""The balance of experts: biases follow the counts of a step.

test_runs.py proves that biases and auxiliary loss are those of one process on any mesh.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.jobs import FLOAT64, MOE, forward_backward, trainer
from tests.parallel.rows import numbers
from titanlite.data.loader import MicroBatch
from titanlite.parallel.dtensor import local_part
from titanlite.parallel.expert_parallel import routers
from titanlite.train.trainer import Trainer

STEPS = [
    *MOE,
    *FLOAT64,
    "--model.overrides.experts=5",
    "--training.global_batch_size=12",
    "--training.steps=3",
]
STEPS += ["--lr_scheduler.warmup_steps=0", "--optimizer.lr=0.01", "--optimizer.eps=1e-3"]
STEPS += ["--metrics.log_freq=1", "--training.local_batch_size=12"]


def counted(argv: list[str], folder: str) -> tuple[list[dict[str, list[int]]], dict[str, Any]]:
    """Train; return the counts of each step, and the biases."""
    run = trainer(argv, folder)
    end_step, counts = run.runner.balance.end_step, list[Any]()
    found = routers(*run.parts)

    def end_and_keep(skipped: torch.Tensor) -> None:
        counts.append({name: router.counts.tolist() for name, router in found.items()})
        end_step(skipped)
        for router in found.values():
            assert not router.counts.any() and not router.auxiliary

    run.runner.balance.end_step = end_and_keep  # type: ignore[method-assign]
    run.train()
    return counts, {name: router.bias for name, router in found.items()}


@pytest.mark.parametrize("balance", ["bias", "sequence"])
def test_biases_and_what_is_logged_follow_from_the_counts_of_a_step(pool, tmp_path, balance):
    argv = [*STEPS, f'--model.overrides.balance="{balance}"']
    ((steps, biases),) = pool.run(counted, argv, str(tmp_path), world=1)
    tokens = 12 * 16 * 2  # each has two experts
    for name, bias in biases.items():
        counts = torch.tensor([step[name] for step in steps], dtype=torch.float64)
        assert (counts.sum(-1) == tokens).all() and counts.unique().numel() > 2
        moves = (counts.mean(-1, keepdim=True) - counts).sign()  # one for each step
        centered = (moves - moves.mean(-1, keepdim=True)).sum(0) * 1e-3
        assert (bias is None) == (balance == "sequence")
        if bias is not None:
            assert bias.dtype == torch.float32
            assert torch.allclose(bias.double(), centered, atol=1e-8)
    for logged, step in zip(numbers(tmp_path), steps, strict=True):
        assert (logged["auxiliary_loss"] > 0) == (balance == "sequence")
        loads = [max(counts) * len(counts) / tokens for counts in step.values()]
        assert logged["expert_load_max"] == pytest.approx(max(loads)), "of the layer with the worst"


def biases_after_a_step(run: Trainer, poison: bool = False) -> dict[str, torch.Tensor]:
    """Take a step, with `poison` one with a gradient that is not a number."""
    run.step += 1
    labels = torch.randint(256, (2, 16))
    forward_backward(run, [MicroBatch(torch.stack([labels, labels], dim=1))])
    if poison:
        gradient = run.runner.parameters[0].grad
        assert gradient is not None
        local_part(gradient).fill_(torch.nan)
    run.runner.update(run.step, run.runner.clip_gradients())
    return {name: router.bias.clone() for name, router in routers(*run.parts).items()}


def good_and_bad_step(argv: list[str], folder: str) -> tuple[Any, Any]:
    run = trainer(argv, folder)
    return biases_after_a_step(run), biases_after_a_step(run, poison=dist.get_rank() == 0)


def test_a_step_that_is_not_finite_moves_no_bias(pool, tmp_path):
    """The good one moves them by as much up as down, though of 5 experts no half has more tokens
    than the mean.
    """
    argv = [*MOE, '--model.overrides.balance="bias"', "--model.overrides.experts=5"]
    for good, bad in pool.run(good_and_bad_step, argv, str(tmp_path), world=2):
        for name, bias in good.items():
            assert bias.any() and torch.equal(bias, bad[name])
            assert bias.double().mean().abs() < 1e-9


def validate_and_generate(argv: list[str], folder: str) -> list[float]:
    """Return what the routers have counted after a validation and a sample."""
    run = trainer(argv, folder)
    run.report.clock.restart()
    run.validate()
    run.show_sample()
    found = routers(*run.parts).values()
    return [int(router.counts.sum()) + float(router.auxiliary) for router in found]


def test_validation_and_generation_do_not_count(pool, tmp_path):
    words = "--validation.enable --validation.freq=1 --validation.steps=1 --generate.tokens=2"
    argv = [*MOE, *words.split()]
    assert pool.run(validate_and_generate, argv, str(tmp_path), world=1) == [[0, 0]]
