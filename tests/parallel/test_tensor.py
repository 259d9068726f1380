"""Tensor and sequence parallel: its collectives, what it refuses, and validation and generation
with it.

tests/parity proves that its numbers equal those of one process.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.jobs import (
    FLOAT64,
    QUIET,
    TINY,
    fake_world,
    forward_backward,
    job,
    micro_batches,
    trainer,
    validated,
)
from tests.parallel.test_exact import ragged_batch
from titanlite.config.load import ConfigError
from titanlite.errors import UserError
from titanlite.parallel import tensor_parallel
from titanlite.parallel.build import Context, build_model
from titanlite.train.generate import generate
from titanlite.train.loss import token_loss_sum

TP2 = "--parallelism.tensor_parallel_degree=2"
EVEN = [*TINY, "--model.overrides.n_kv_heads=2"]


def collectives(argv: list[str], folder: str) -> Counter[str]:
    """Count the collectives of one step that DTensors issue: tensor parallel's, not FSDP's."""
    from torch.utils._python_dispatch import TorchDispatchMode

    run = trainer([*argv, "--training.local_batch_size=12"], folder)
    seen: Counter[str] = Counter()

    class Recorded(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "c10d_functional" in func.namespace:
                seen[func.overloadpacket.__name__] += 1
            return func(*args, **(kwargs or {}))

    mine = micro_batches(*ragged_batch(), run.rank_slice)
    with Recorded():
        forward_backward(run, mine)
    return Counter(
        {name: count for name, count in seen.items() if not name.startswith(("wait", "_wrap"))}
    )


def rows_of_the_gradient(argv: list[str], folder: str) -> set[int]:
    """Return the rows of the gradients that the look-up of tokens makes."""
    from torch.utils._python_dispatch import TorchDispatchMode

    run = trainer(argv, folder)
    rows = set[int]()

    class Recorded(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.embedding_dense_backward.default:
                rows.add(len(made))
            return made

    mine = micro_batches(*ragged_batch(), run.rank_slice)
    with Recorded():
        forward_backward(run, mine)
    return rows


def test_the_embedding_has_a_gradient_of_a_ranks_own_rows(pool, tmp_path):
    """Under a pipeline it stays until the end of the step: 8 GiB for all rows of Llama 405B."""
    argv = [*EVEN, TP2, "--training.local_batch_size=12"]
    vocab_size = 256
    made = pool.run(rows_of_the_gradient, argv, str(tmp_path), world=2)
    assert made == [{vocab_size // 2}] * 2


def test_sequence_is_gathered_once_per_module(pool, tmp_path):
    """The backward pass scatters it again, and sums the gradients of replicated parameters."""
    layers, norms = 2, 5
    expected = {
        "all_gather_into_tensor": (2 * layers + 1)
        + (2 * layers + 1),  # into layers and head; grads of their outputs
        "reduce_scatter_tensor": (2 * layers + 1) + (2 * layers + 1),
        "all_reduce": norms + 2,  # the loss needs the largest logit, and the sums
    }
    argv = [*EVEN, TP2, *FLOAT64]
    assert pool.run(collectives, argv, str(tmp_path), world=2)[0] == expected
    gathered = pool.run(
        collectives, [*argv, "--parallelism.disable_loss_parallel"], str(tmp_path), world=2
    )[0]
    assert gathered == {
        **expected,
        "all_gather_into_tensor": expected["all_gather_into_tensor"] + 1,
        "all_reduce": norms,
    }
    qwen = [*EVEN, "--model.name=qwen3", "--model.overrides.head_dim=8", TP2, *FLOAT64]
    norms_of_heads = 2 * layers
    assert pool.run(collectives, qwen, str(tmp_path), world=2)[0] == {
        **expected,
        "all_reduce": expected["all_reduce"] + norms_of_heads,
    }


def test_partial_resharding_is_refused_with_tensor_parallel():
    with pytest.raises(
        ConfigError,
        match=(
            "FSDP2 keeps matrices that tensor parallel splits on all sharding ranks "
            'or on one; use "always"'
        ),
    ):
        job([*EVEN, TP2, "--parallelism.fsdp_reshard_after_forward=2"], 8)


def validation_and_sample(argv: list[str], folder: str) -> tuple[float, str]:
    run = trainer([*argv, *FLOAT64, "--validation.enable", "--validation.steps=3"], folder)
    loss = validated(run)
    settings = run.job.config.generate.model_copy(
        update={"tokens": 9, "temperature": 0.0, "prompt": "def "}
    )
    return loss, generate(run.runner.forward, run.tokenizer, settings, 16, 0)


def test_validation_and_generation_equal_one_process(pool, tmp_path):
    """Two ranks do not divide the length of the prompt, nor every length after it, nor the batches
    of validation.
    """
    (loss, text), *_ = pool.run(validation_and_sample, EVEN, str(tmp_path), world=1)
    split = pool.run(validation_and_sample, [*EVEN, TP2], str(tmp_path), world=4)
    assert [found[1] for found in split] == [text] * 4
    assert all(found[0] == pytest.approx(loss, rel=1e-12) for found in split)


def sharded_loss(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of logits split over the vocabulary, and their whole gradient."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    split = distribute_tensor(logits, mesh, [Shard(-1)]).requires_grad_()
    loss = token_loss_sum(split, labels)
    loss.backward()
    assert isinstance(split.grad, DTensor)
    return loss.detach(), split.grad.full_tensor()  # torch 2.11 gathers it already


def test_loss_of_bfloat16_logits_is_computed_in_float32(pool):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 40, 99, generator=generator).mul(3).bfloat16()
    labels = torch.randint(99, (2, 40), generator=generator)
    exact = logits.double().requires_grad_()
    expected = token_loss_sum(exact, labels)
    expected.backward()
    for loss, gradient in pool.run(sharded_loss, logits, labels, world=2):
        assert loss.dtype == torch.float32 and loss.item() == pytest.approx(
            expected.item(), rel=1e-6
        )
        assert ((gradient - exact.grad).abs() <= 2**-8 * exact.grad.abs() + 1e-6).all(), (
            "rounded once"
        )


def test_indivisible_width_is_refused_by_name():
    found = job([*EVEN, TP2, "--model.overrides.hidden_dim=33"], 2)
    model, table = build_model(found)
    with pytest.raises(
        UserError,
        match=r"2 does not divide the 33 outputs of layers.0.feed_forward.w1; legal.*1, 3, 11",
    ):
        tensor_parallel.check(model, table, 2)


def test_bias_role_that_contradicts_its_weight_is_refused():
    model, table = build_model(job([*QUIET, "--model.name=gpt2"], 1))
    name = "layers.0.feed_forward.w2.bias"
    table[name] = dataclasses.replace(table[name], tensor="row")
    with pytest.raises(UserError, match=rf'{name} has the role "row".* must be "replicated"'):
        tensor_parallel.check(model, table, 2)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "set compile.enable"),
        ([TP2], "set compile.enable"),
        ([TP2, "--compile.enable", "--compile.components=['loss']"], "set compile.enable"),
        ([TP2, "--compile.enable"], "GPUs that reach each other's memory"),
    ],
)
def test_async_tensor_parallel_names_missing_requirements(argv, message):
    with pytest.raises(ConfigError, match=message):
        job([*EVEN, "--parallelism.enable_async_tensor_parallel", *argv], 2)


@pytest.mark.parametrize(
    ("batch", "overlapped"), [(1, "but for all-gathers: these need"), (2, "(async)")]
)
def test_async_tensor_parallel_says_what_it_does_not_overlap(monkeypatch, batch, overlapped):
    monkeypatch.setattr(tensor_parallel, "enable_async_tensor_parallel", lambda group: None)
    compiled = ["--compile.enable", "--job.device=auto", f"--training.local_batch_size={batch}"]
    found = job([*EVEN, TP2, "--parallelism.enable_async_tensor_parallel", *compiled], 2)
    model, table = build_model(found)
    with fake_world(found.layout) as mesh:
        (note,) = tensor_parallel.apply(model, Context(found, mesh, table, torch.device("cpu")))
    assert overlapped in note and ("all-gathers" in note) == (batch == 1)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model.overrides.n_kv_heads=1"], "2 does not divide 1 key and value heads; legal: 1"),
        (["--training.seq_len=15"], "2 does not divide 15 tokens in a sequence"),
        (
            ["--validation.enable", "--validation.seq_len=15"],
            "2 does not divide 15 tokens in a validation sequence",
        ),
    ],
)
def test_indivisible_degree_is_refused_with_the_legal_ones(argv, message):
    with pytest.raises(ConfigError, match=message):
        job([*EVEN, TP2, *argv], 2)
