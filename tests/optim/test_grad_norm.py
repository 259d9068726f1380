"""The gradient norm is the same on any number of ranks, of any size, and of stages without
gradients.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

from tests.lanes import sample
from titanlite.optim.grad_norm import clip_grad_norm

ROWS = 1 << 6
of_both_types = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def norm(*gradients: torch.Tensor, p: float = 2.0, stages: DeviceMesh | None = None) -> float:
    weights = []
    for gradient in gradients:
        weight = nn.Parameter(torch.zeros_like(gradient))
        weight.grad = gradient
        weights.append(weight)
    return clip_grad_norm(weights, math.inf, p, stages).item()


def all_ranks() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def norm_of_shards(columns: int, dtype: torch.dtype) -> tuple[float, float]:
    """Return the norm of one sharded gradient, and the value of each of its elements."""
    mesh = all_ranks()
    own = torch.full((ROWS // mesh.size(), columns), 0.1, dtype=dtype)
    return norm(DTensor.from_local(own, mesh, (Shard(0),))), own[0, 0].double().item()


@of_both_types
@pytest.mark.parametrize("elements", sample([1 << 22, 1 << 26], 1 << 22))
def test_the_norm_on_one_and_four_ranks_is_exact_of_any_size(pool, elements, dtype):
    for world in (1, 4):
        for found, value in pool.run(norm_of_shards, elements // ROWS, dtype, world=world):
            assert found == pytest.approx(value * math.sqrt(elements), rel=1e-7), world


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


def norm_of_all_placements(dtype: torch.dtype, p: float) -> float:
    """Return the norm of four gradients whose full tensors are threes: sharded, replicated, both,
    and plain.
    """
    mesh = init_device_mesh("cpu", (2, 2))
    threes = torch.full((2, 2), 3.0, dtype=dtype)
    placements = [(Shard(0), Shard(0)), (Replicate(), Replicate()), (Replicate(), Shard(1))]
    gradients = [DTensor.from_local(threes, mesh, each, run_check=False) for each in placements]
    return norm(*gradients, threes, p=p)


@of_both_types
@pytest.mark.parametrize("p, expected", [(2.0, math.sqrt((16 + 4 + 8 + 4) * 9)), (math.inf, 3.0)])
def test_what_several_ranks_hold_counts_once(pool, p, expected, dtype):
    found = pool.run(norm_of_all_placements, dtype, p, world=4)
    assert found == [pytest.approx(expected, rel=1e-12)] * 4


def collectives_of_a_norm() -> int:
    """Return how many collectives the norm of three sharded gradients takes."""
    gradients = [DTensor.from_local(torch.ones(2), all_ranks(), (Shard(0),)) for _ in range(3)]
    with CommDebugMode() as counted:
        assert norm(*gradients) == pytest.approx(math.sqrt(12))
    return counted.get_total_counts()


def test_a_norm_takes_one_collective_whatever_the_number_of_gradients(pool):
    assert pool.run(collectives_of_a_norm, world=2) == [1, 1]


def norm_of_stages(p: float, dtype: torch.dtype) -> float:
    """Return the norm over two stages; the second one is frozen and has no gradient."""
    gradients = [torch.tensor([3.0, -4.0], dtype=dtype)] * (dist.get_rank() == 0)
    return norm(*gradients, p=p, stages=all_ranks())


@of_both_types
@pytest.mark.parametrize(("p", "expected"), [(2.0, 5.0), (math.inf, 4.0)])
def test_a_stage_without_gradients_knows_the_norm_of_all(pool, p, expected, dtype):
    assert pool.run(norm_of_stages, p, dtype, world=2) == [expected, expected]
