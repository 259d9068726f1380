"""Tensor and sequence parallel: its collectives, and what it refuses.

tests/parity proves that its numbers equal those of one process.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.jobs import FLOAT64, QUIET, job
from tests.messages import refused
from tests.parallel.rows import EVEN, computed, on_a_fake_rank
from tests.parallel.rows import TP as TP2
from titanlite.parallel import tensor_parallel
from titanlite.parallel.build import build_model
from titanlite.train.loss import token_loss_sum


def collectives(pool, folder: Path, *argv: str) -> Counter[str]:
    """Count the collectives of one step that DTensors issue: tensor parallel's, not FSDP's; and
    the elements of the gradient that the look-up of tokens makes.
    """
    seen = Counter[str]()
    for namespace, name, _, made in pool.run(computed, [*argv], str(folder), world=2)[0]:
        if "c10d_functional" in namespace and not name.startswith(("wait", "_wrap")):
            seen[name] += 1
        if name == "embedding_dense_backward":
            seen["elements of the embedding"] += made
    return seen


def test_sequence_is_gathered_once_per_module(pool, tmp_path):
    """The backward pass scatters it again, and sums the gradients of replicated parameters. The
    embedding's has a rank's own rows: under a pipeline it stays until the end of the step, 8 GiB
    for all rows of Llama 405B.
    """
    layers, norms = 2, 5
    expected = {
        # into layers and head; gradients of their outputs
        "all_gather_into_tensor": (2 * layers + 1) + (2 * layers + 1),
        "reduce_scatter_tensor": (2 * layers + 1) + (2 * layers + 1),
        "all_reduce": norms + 2,  # the loss needs the largest logit, and the sums
        "elements of the embedding": 256 * 16 // 2,
    }
    argv = [*EVEN, TP2, *FLOAT64]
    assert collectives(pool, tmp_path, *argv) == expected
    whole = [*argv, "--parallelism.disable_loss_parallel"]
    assert collectives(pool, tmp_path, *whole) == {
        **expected,
        "all_gather_into_tensor": expected["all_gather_into_tensor"] + 1,
        "all_reduce": norms,
    }
    qwen = [*argv, "--model.name=qwen3", "--model.overrides.head_dim=8"]
    norms_of_heads = 2 * layers
    assert collectives(pool, tmp_path, *qwen) == {
        **expected,
        "all_reduce": expected["all_reduce"] + norms_of_heads,
    }


def sharded_loss(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of logits split over the vocabulary, and their whole gradient."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    split = distribute_tensor(logits, mesh, [Shard(-1)]).requires_grad_()
    loss = token_loss_sum(split, labels)
    loss.backward()
    assert isinstance(split.grad, DTensor)
    return loss.detach(), split.grad.full_tensor()  # torch 2.11 gathers it already


def test_loss_of_bfloat16_logits_is_computed_in_float32_and_rounded_once(pool):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 40, 99, generator=generator).mul(3).bfloat16()
    labels = torch.randint(99, (2, 40), generator=generator)
    exact = logits.double().requires_grad_()
    expected = token_loss_sum(exact, labels)
    expected.backward()
    for loss, gradient in pool.run(sharded_loss, logits, labels, world=2):
        assert loss.dtype == torch.float32
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        assert ((gradient - exact.grad).abs() <= 2**-8 * exact.grad.abs() + 1e-6).all()


def test_indivisible_width_is_refused_by_name():
    found = job([*EVEN, TP2, "--model.overrides.hidden_dim=33"], 2)
    model, table = build_model(found)
    with refused("2 does not divide", "33 outputs", "layers.0.feed_forward.w1", "1, 3, 11"):
        tensor_parallel.check(model, table, 2)


def test_bias_role_that_contradicts_its_weight_is_refused():
    model, table = build_model(job([*QUIET, "--model.name=gpt2"], 1))
    name = "layers.0.feed_forward.w2.bias"
    table[name] = dataclasses.replace(table[name], tensor="row")
    with refused(name, '"row"', 'must be "replicated"'):
        tensor_parallel.check(model, table, 2)


@pytest.mark.parametrize("batch", [1, 2])
def test_async_tensor_parallel_says_what_it_does_not_overlap(monkeypatch, batch):
    monkeypatch.setattr(tensor_parallel, "enable_async_tensor_parallel", lambda group: None)
    compiled = ["--compile.enable", "--job.device=auto", f"--training.local_batch_size={batch}"]
    argv = [*EVEN, TP2, "--parallelism.enable_async_tensor_parallel", *compiled]
    with on_a_fake_rank(argv, 2) as (model, context):
        (note,) = tensor_parallel.apply(model, context)
    assert "async" in note and ("all-gathers" in note) == (batch == 1)
