"""Low precision is within a stated bound of float64 on one process; replicated parameters compute
like the rest.
"""

import pytest
import torch

from tests.jobs import FLOAT64, MOE, TINY, forward_backward, gradients, relative_error, trainer
from tests.lanes import sample
from tests.parallel.rows import COMPILED, RECOMPUTED, SAMPLES, SMALL, own_batches
from titanlite.optim.grad_norm import grad_norm

BFLOAT16 = ["--training.mixed_precision_param=bfloat16"]
EMBEDDING, ROWS = "tok_embeddings.weight", 5e-3
BOUND = 0.02
"""Relative error of a gradient: bfloat16 has 8 bits, and the largest error measured was 0.013."""


def gradients_and_norm(argv: list[str], folder: str) -> tuple[dict, torch.Tensor]:
    run = trainer([*argv, f"--training.global_batch_size={SAMPLES}"], folder)
    run.step = 1
    forward_backward(run, own_batches(run))
    return gradients(run), grad_norm(run.runner.parameters)


def local(size: int) -> str:
    return f"--training.local_batch_size={size}"


@pytest.mark.parametrize("master", ["float32", "bfloat16"])
@pytest.mark.parametrize(("world", "size"), sample([(2, 2), (4, 3)], (2, 2)))
def test_bfloat16_gradients_are_close_to_float64(pool, tmp_path, master, world, size):
    exact = [*TINY, *FLOAT64, local(SAMPLES)]
    ((expected, exact_norm),) = pool.run(gradients_and_norm, exact, str(tmp_path), world=1)
    argv = [*TINY, *BFLOAT16, f"--training.dtype={master}", local(size)]
    for found, norm in pool.run(gradients_and_norm, argv, str(tmp_path), world=world):
        assert norm.dtype == torch.float64  # on a CPU, whatever the gradients
        assert norm.item() == pytest.approx(exact_norm.item(), rel=2e-3)
        for name, gradient in found.items():
            assert gradient.dtype == getattr(torch, master)
            assert relative_error(gradient.double(), expected[name]) < BOUND, name


TIED = "--model.overrides.tied"
COMPILES = f"{COMPILED} {RECOMPUTED}full"


@pytest.mark.parametrize(
    "more",
    sample(["", COMPILES, TIED], TIED, nightly=[COMPILES]),
    ids=["", "compiled", "tied"],
)
def test_replicated_parameters_compute_in_mixed_precision(pool, tmp_path, more):
    """bfloat16 activations, float32 masters and gradients: the same bits as with everything
    sharded.

    There are two exceptions. The gradients of an embedding's row, whose table is not cast, are
    added in float32. And FSDP2 of torch 2.15 (not 2.13) takes a norm weight's gradient in
    float32, as the kernel computes it, while the replicated weight's gradient is rounded to
    bfloat16 first: a relative difference of 2^-9 on each rank."""
    fsdp_takes_float32 = tuple(int(part) for part in torch.__version__.split(".")[:2]) > (2, 13)
    argv = [*TINY, *BFLOAT16, local(SAMPLES // 2), *more.split()]
    sharded, _ = pool.run(gradients_and_norm, argv, str(tmp_path), world=2)[0]
    for found, _ in pool.run(gradients_and_norm, [*argv, SMALL], str(tmp_path), world=2):
        assert found.keys() == sharded.keys()
        for name, gradient in found.items():
            bound = 2**-8 if fsdp_takes_float32 and name.endswith("norm.weight") else 0.0
            bound = ROWS if name == EMBEDDING and more != TIED else bound
            assert relative_error(gradient, sharded[name]) <= bound, name


ALONE = {
    "tied, in chunks": f"{TIED} --training.loss_chunks=4",
    "whole blocks": f"{RECOMPUTED}full",
    "by operation": f"{RECOMPUTED}selective",
    "compiled": COMPILED,
    "compiled, by operation": f"{COMPILED} {RECOMPUTED}selective",
    "compiled, whole blocks": f"{COMPILED} {RECOMPUTED}full",
    "experts, compiled, whole blocks": f"{COMPILED} {RECOMPUTED}full",
    "frozen": "--model.freeze=['layers.0.*']",
    "adapters": "--lora.rank=2 --lora.alpha=4",
    "accumulated": local(SAMPLES // 3),
    "float8": "--quantize.linear.float8.enable --quantize.linear.float8.emulate "
    "--model.overrides.hidden_dim=32",
    "experts": "",
    "experts, by operation": f"{RECOMPUTED}selective",
    "experts, whole blocks": f"{RECOMPUTED}full",
}


@pytest.mark.parametrize(
    "name", sample(ALONE, "tied, in chunks", "compiled, by operation", "experts, by operation")
)
def test_one_rank_without_fsdp2_has_the_bits_that_fsdp2_gives(pool, tmp_path, name):
    """Offloading to the CPU keeps FSDP2. The gradients of an embedding's row are added in float32
    where the table is not cast.
    """
    argv = [*(MOE if "experts" in name else TINY), *BFLOAT16, local(SAMPLES), *ALONE[name].split()]
    ((own, _),) = pool.run(gradients_and_norm, argv, str(tmp_path), world=1)
    argv.append("--training.enable_cpu_offload")
    ((expected, _),) = pool.run(gradients_and_norm, argv, str(tmp_path), world=1)
    assert own.keys() == expected.keys()
    for parameter, gradient in own.items():
        bound = ROWS if parameter == EMBEDDING and "tied" not in name else 0.0
        assert relative_error(gradient, expected[parameter]) <= bound, parameter
