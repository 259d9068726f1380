"""Small jobs whose layers are wide enough for float8, and functions that run them on the pool's
ranks.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from tests.jobs import (
    QUIET,
    forward_backward,
    gradients,
    micro_batches,
    relative_error,
    trainer,
    weights,
)
from tests.parallel.test_exact import SAMPLES, ragged_batch
from titanlite.optim.grad_norm import clip_grad_norm
from titanlite.train.loss import count_valid
from titanlite.train.report import loss_over_ranks
from titanlite.train.trainer import Trainer

_FIELDS = "dim=64 n_layers=2 n_heads=4 n_kv_heads=2 hidden_dim=128".split()
EVERY_LAYER = "--quantize.linear.float8.filter_fqns=[]"
WIDE = [*QUIET, EVERY_LAYER, *(f"--model.overrides.{field}" for field in _FIELDS)]
GPT2 = [
    *QUIET,
    EVERY_LAYER,
    "--model.name=gpt2",
    *(f"--model.overrides.{f}" for f in "dim=64 n_layers=2 n_heads=4 dropout=0.0".split()),
]
FLOAT8 = "--quantize.linear.float8.enable"
RECIPE = "--quantize.linear.float8.recipe_name="
AG = "--quantize.linear.float8.enable_fsdp_float8_all_gather"
PRECOMPUTED = "--quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp"
TP2 = "--parallelism.tensor_parallel_degree=2"
HSDP = "--parallelism.data_parallel_replicate_degree=2"
BFLOAT16 = "--training.mixed_precision_param=bfloat16"


def prepared(argv: list[str], folder: str) -> tuple[Trainer, Any]:
    """Return a trainer before its first step, and this rank's part of the ragged batch."""
    torch.compiler.reset()
    tp = 2 if TP2 in argv else 1
    sizes = [f"--training.local_batch_size={SAMPLES * tp // dist.get_world_size()}"]
    run = trainer([*argv, *sizes, f"--training.global_batch_size={SAMPLES}"], folder)
    run.step = 1
    return run, micro_batches(*ragged_batch(), run.rank_slice)


def stepped(run: Trainer, mine: Any) -> torch.Tensor:
    return forward_backward(run, mine)


def one_step(argv: list[str], folder: str) -> dict[str, Any]:
    run, mine = prepared(argv, folder)
    before = weights(run)
    product: Any = torch._scaled_mm
    products: list[int] = []

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        products.append(1)
        return product(*args, **kwargs)

    torch._scaled_mm = counted
    try:
        loss = stepped(run, mine)
    finally:
        torch._scaled_mm = product
    return {
        "before": before,
        "gradients": gradients(run),
        "loss": loss_over_ranks(loss, count_valid(mine[0].labels), run.mesh.loss)[0],
        "products": len(products),
        "norm": clip_grad_norm(run.runner.parameters, math.inf).item(),
    }


def steps(cases: dict[str, list[str]], folder: str) -> dict[str, dict[str, Any]]:
    """Return one step of each case; one run of the pool for all is cheaper than one for each."""
    return {name: one_step(argv, folder) for name, argv in cases.items()}


def error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the relative error of all gradients together."""
    assert found.keys() == expected.keys()
    flat = [
        torch.cat([tensors[name].double().flatten() for name in expected])
        for tensors in (found, expected)
    ]
    return relative_error(*flat)
