"""Small jobs whose layers are wide enough for float8, and functions that run them on the pool's
ranks.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from tests.jobs import QUIET, relative_error
from tests.parallel import rows
from tests.parallel.rows import SAMPLES, TP

_FIELDS = "dim=64 n_layers=2 n_heads=4 n_kv_heads=2 hidden_dim=128".split()
EVERY_LAYER = "--quantize.linear.float8.filter_fqns=[]"
WIDE = [*QUIET, EVERY_LAYER, *(f"--model.overrides.{field}" for field in _FIELDS)]
GPT2 = [*rows.GPT2, EVERY_LAYER]
GPT2 += [f"--model.overrides.{field}" for field in "dim=64 n_heads=4 dropout=0.0".split()]
FLOAT8 = "--quantize.linear.float8.enable"
EMULATED = "--quantize.linear.float8.emulate"
FILTER = "--quantize.linear.float8.filter_fqns="
RECIPE = "--quantize.linear.float8.recipe_name="
AG = "--quantize.linear.float8.enable_fsdp_float8_all_gather"
PRECOMPUTED = "--quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp"
BFLOAT16 = "--training.mixed_precision_param=bfloat16"


def sized(argv: list[str]) -> list[str]:
    """Add the size of this rank's part of the ragged batch, which is not accumulated."""
    size = SAMPLES * (2 if TP in argv else 1) // dist.get_world_size()
    return [*argv, *rows.SGD, f"--training.local_batch_size={size}"]


def step(argv: list[str], folder: str) -> dict[str, Any]:
    """Return the numbers of one step, with the number of products in float8."""
    product, products = torch._scaled_mm, list[int]()

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        products.append(1)
        return product(*args, **kwargs)

    with patch.object(torch, "_scaled_mm", counted):
        return {**rows.one_step(sized(argv), folder), "products": len(products)}


def error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the relative error of all gradients together."""
    assert found.keys() == expected.keys()
    flat = [
        torch.cat([tensors[name].double().flatten() for name in expected])
        for tensors in (found, expected)
    ]
    return relative_error(*flat)
