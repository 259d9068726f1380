"""Llama 3: rotations, buffers, and a table that covers every parameter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.messages import refused
from tests.models.small import SMALL, built
from titanlite.models import llama3
from titanlite.models.common.rope import rotate
from titanlite.parallel.build import build_meta_model
from titanlite.parallel.init import materialize
from titanlite.registry import Rule, assign, ones


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rotation_by_complex_numbers_is_that_by_pairs_to_the_last_digit(dtype):
    """To the bit in bfloat16, which is rounded once: from angles and products in float32. A CPU may
    fuse a product and a sum where a head is no multiple of its vectors.
    """
    model, _ = built(*SMALL["llama3"])
    rotations = model.rope(None, 64)
    assert rotations.dtype == torch.float32
    heads = torch.randn(2, 64, 4, 8, generator=torch.Generator().manual_seed(0))
    cos, sin = rotations.unbind(-1)

    def by_pairs(x: torch.Tensor) -> torch.Tensor:
        a, b = x.to(torch.promote_types(dtype, torch.float32)).unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2).to(dtype)

    def turn(x: torch.Tensor) -> torch.Tensor:
        return rotate(x, rotations)

    results = []
    for rotation in (by_pairs, turn, torch.compile(turn, backend="eager")):
        leaf = heads.to(dtype).clone().requires_grad_()
        rotated = rotation(leaf)
        rotated.backward(heads.flip(0).to(dtype))
        assert leaf.grad is not None
        results.append(torch.stack([rotated, leaf.grad]))
    bound = 0.0 if dtype == torch.bfloat16 else 4 * torch.finfo(dtype).eps
    for found in results[1:]:
        assert (found - results[0]).abs().max() <= bound


def test_a_buffer_without_reset_is_an_error():
    model, table = built(*SMALL["llama3"])
    model.layers["0"].register_buffer("mask", torch.ones(3))
    with refused("layers.0", "(mask)", "reset_buffers"):
        materialize(model, table, 0, torch.device("cpu"))


EMBEDDING = "tok_embeddings.weight"
NAMES = [EMBEDDING, "layers.0.w.weight", "layers.1.w.weight"]
ROWS = (Rule(EMBEDDING, ones, "embedding"), Rule("layers.*.w.weight", ones, "column"))


def test_a_table_must_cover_every_parameter_once():
    assert assign(ROWS, NAMES, ties={}).keys() == {*NAMES}
    for rows, more, ties, says in (
        (ROWS, ["norm.weight"], {}, ["norm.weight", "no row"]),
        ((*ROWS, Rule("norm.weight", ones, "norm")), [], {}, ["norm.weight", "no parameter"]),
        ((*ROWS, Rule("layers.1.w.weight", ones, "row")), [], {}, ["layers.1.w.weight", "several"]),
        ((Rule(EMBEDDING, ones, "embeding"), ROWS[1]), [], {}, ['"embeding"', "embedding, column"]),  # type: ignore
        (ROWS, [], {"output.weight": EMBEDDING}, ["output.weight", EMBEDDING]),
    ):
        with refused(*says):
            assign(rows, [*NAMES, *more], ties=ties)
    spec = replace(llama3.SPEC, rules=lambda flavor: ROWS)
    with refused("norm.weight", "no row", __file__):
        build_meta_model(spec, llama3.FLAVORS["debugmodel"])
