"""The balance of experts: biases follow the counts of a step.

test_runs.py proves that biases and auxiliary loss are those of one process on any mesh.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.jobs import FLOAT64, MOE, forward_backward, trainer
from tests.parallel.rows import numbers, own_batches
from titanlite.parallel.expert_parallel import routers

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


def biases_of_steps(argv: list[str], folder: str, norms: list[float]) -> list[torch.Tensor]:
    """Return the biases after steps with these norms."""
    run, found = trainer(argv, folder), list[torch.Tensor]()
    for norm in norms:
        forward_backward(run, own_batches(run))
        run.runner.update(1, torch.tensor(norm))
        biases: list[Any] = [router.bias for router in routers(*run.parts).values()]
        found.append(torch.stack(biases))
    return found


def test_a_step_that_is_not_finite_moves_no_bias(pool, tmp_path):
    argv = [*STEPS, "--model.overrides.balance=bias"]
    ((good, bad),) = pool.run(biases_of_steps, argv, str(tmp_path), [1.0, math.nan], world=1)
    assert good.any() and torch.equal(good, bad)
