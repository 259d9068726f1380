"""The gradient norm is exact, and shows a single element that is not finite.

tests/parallel proves that what several ranks hold counts once, and that all stages know it.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode

from titanlite.optim.grad_norm import grad_norm

of_both_types = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def norm(*gradients: torch.Tensor) -> float:
    weights = []
    for gradient in gradients:
        weight = nn.Parameter(torch.zeros_like(gradient))
        weight.grad = gradient
        weights.append(weight)
    return grad_norm(weights).item()


@of_both_types
@pytest.mark.parametrize("shape", [((1 << 18) + 5,), (512, 1027)])
def test_the_norm_is_exact_of_any_values_and_strides(shape, dtype):
    """Also of elements beyond the last whole row, and of a gradient that lies transposed in
    memory.
    """
    value = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = pytest.approx(value.double().norm().item(), rel=2e-8)
    assert [norm(value), norm(value.t().contiguous().t())] == [expected] * 2


@of_both_types
@pytest.mark.parametrize(
    "bad, expected", [(math.inf, "inf"), (-math.inf, "inf"), (math.nan, "nan"), (1e20, "inf")]
)
@pytest.mark.parametrize("place", [0, -1])
def test_one_element_that_is_not_finite_shows_in_the_norm(place, bad, expected, dtype):
    """So does a finite one whose square is not: in rows, as on a GPU."""
    gradient = torch.ones((1 << 18) + 64, dtype=dtype)
    gradient[place] = bad
    assert str(norm(gradient)) == expected


def collectives_of_a_norm() -> int:
    """Return how many collectives the norm of three sharded gradients takes."""
    mesh = init_device_mesh("cpu", (2,))
    gradients = [DTensor.from_local(torch.ones(2), mesh, (Shard(0),)) for _ in range(3)]
    with CommDebugMode() as counted:
        assert norm(*gradients) == pytest.approx(math.sqrt(12))
    return counted.get_total_counts()


def test_a_norm_takes_one_collective_whatever_the_number_of_gradients(pool):
    assert pool.run(collectives_of_a_norm, world=2) == [1, 1]
