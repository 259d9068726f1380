"""Llama 3: published sizes, documents, pipeline stages, FLOPs, and a table that covers every
parameter.
"""

import dataclasses
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from titanlite import registry
from titanlite.errors import UserError
from titanlite.models.common import RopeScaling
from titanlite.models.common.rope import rotate
from titanlite.models.llama3 import FLAVORS, SPEC, LlamaConfig
from titanlite.observe.throughput import flops_per_token
from titanlite.parallel.build import shared_names
from titanlite.parallel.init import materialize
from titanlite.registry import Rule, assign, get_model, ones, register_model

PUBLISHED = {
    "1B": 1_235_814_400,
    "3B": 3_212_749_824,
    "8B": 8_030_261_248,
    "70B": 70_553_706_496,
    "405B": 405_853_388_800,
}
SMALL = LlamaConfig(32, 2, 4, 2, 48, vocab_size=99, max_seq_len=512, norm_eps=1e-5)
VARIANTS = {
    "plain": SMALL,
    "tied": dataclasses.replace(SMALL, tied=True),
    "scaled": dataclasses.replace(
        SMALL, rope_scaling=RopeScaling(8.0, 1.0, 4.0, original_positions=64)
    ),
}


def build(config: LlamaConfig, positions: int = 64):
    """Return the model with its initial values, and its table."""
    with torch.device("meta"):
        model = SPEC.module(config, positions)
    table = assign(
        SPEC.rules(config), [n for n, _ in model.named_parameters()], ties=shared_names(model)
    )
    materialize(model, table, 0, torch.device("cpu"))
    return model, table


@pytest.mark.parametrize("flavor", PUBLISHED)
def test_flavor_has_the_published_parameter_count(flavor):
    with torch.device("meta"):
        model = SPEC.module(FLAVORS[flavor], 16)
    assert sum(p.numel() for p in model.parameters()) == PUBLISHED[flavor]
    assert SPEC.parameters and SPEC.parameters(FLAVORS[flavor]) == PUBLISHED[flavor]


def test_document_mask_equals_separate_documents():
    model, _ = build(SMALL)
    tokens = torch.randint(99, (1, 30))
    lengths = [7, 1, 22]
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)).unsqueeze(0)
    positions = torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0)
    with torch.no_grad():
        together = model(tokens, positions=positions, documents=documents)
        separate = torch.cat([model(part) for part in tokens.split(lengths, dim=1)], dim=1)
    assert (together - separate).abs().max() <= 1e-6


def test_rotary_embedding_rounds_once_from_float32():
    """Angles and products are in float32, whatever the activations have: bfloat16 would tell few
    positions apart.
    """
    model: Any = build(SMALL)[0]
    turns = model.rope(None, 64)
    x = torch.randn(2, 64, 4, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = rotate(x.double(), turns.double())
    found = rotate(x, turns)
    assert found.dtype == torch.bfloat16 and turns.dtype == torch.float32
    assert ((found - exact).abs() <= 2**-8 * exact.abs() + 1e-6).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rotation_by_complex_numbers_is_that_by_pairs_to_the_last_digit(dtype):
    """To the bit in bfloat16; a CPU may fuse a product and a sum where a head is no multiple of its
    vectors.
    """
    model: Any = build(SMALL)[0]
    turns = model.rope(None, 64)
    cos, sin = turns.unbind(-1)
    x = torch.randn(2, 64, 4, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(dtype)

    def by_pairs(x: torch.Tensor) -> torch.Tensor:
        a, b = x.to(torch.promote_types(dtype, torch.float32)).unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2).to(dtype)

    def turn(x: torch.Tensor) -> torch.Tensor:
        return rotate(x, turns)

    results = []
    for rotation in (by_pairs, turn, torch.compile(turn, backend="eager")):
        leaf = x.clone().requires_grad_()
        rotated = rotation(leaf)
        rotated.backward(weights)
        assert leaf.grad is not None
        results.append((rotated, leaf.grad))
    for rotated, gradient in results[1:]:
        bound = 0.0 if dtype == torch.bfloat16 else 4 * torch.finfo(dtype).eps
        for found, expected in ((rotated, results[0][0]), (gradient, results[0][1])):
            assert (found - expected).abs().max() <= bound


def test_head_receives_hidden_states_and_the_output_layer():
    model, _ = build(SMALL)
    tokens = torch.randint(99, (2, 8))
    with torch.no_grad():
        assert torch.equal(model(tokens, head=lambda h, output: -output(h)), -model(tokens))


def test_stages_compose_to_the_model():
    """A pipeline stage lacks some modules; layers keep their global numbers."""
    model, _ = build(SMALL)
    tokens = torch.randint(99, (2, 8))
    with torch.no_grad():
        expected = model(tokens)
        first, last = build(SMALL)[0], build(SMALL)[0]
        for stage, name in ((first, "norm"), (first, "output"), (last, "tok_embeddings")):
            setattr(stage, name, None)
        del first.layers["1"], last.layers["0"]
        assert torch.equal(last(first(tokens)), expected)


def test_buffer_without_reset_is_an_error():
    model, table = build(SMALL)
    model.get_submodule("layers.0").register_buffer("mask", torch.ones(3))
    with pytest.raises(
        UserError, match=r"layers.0 has buffers \(mask\) but no method reset_buffers"
    ):
        materialize(model, table, 0, torch.device("cpu"))


def test_ties_survive_materialize():
    model, _ = build(VARIANTS["tied"])
    assert model.output.weight is model.tok_embeddings.weight


def test_flops_equal_the_flop_counter():
    """Under the math backend: torch's counter sees no FLOPs in the CPU's flash kernel."""
    for variant in ("plain", "tied"):
        model, table = build(VARIANTS[variant])
        tokens = torch.randint(99, (2, 32))
        math = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
        with math, FlopCounterMode(display=False) as counter:
            model(tokens).sum().backward()
        expected = flops_per_token(
            model.named_parameters(), table, SPEC.shape(VARIANTS[variant]), 32
        )
        # The embedding's output needs no gradient of its own input, so the first layer counts
        # fully.
        assert counter.get_total_flops() == expected * tokens.numel()


def test_flops_of_8b_match_the_literature():
    config = FLAVORS["8B"]
    with torch.device("meta"):
        model = SPEC.module(config, 16)
    table = assign(SPEC.rules(config), [n for n, _ in model.named_parameters()], ties={})
    found = flops_per_token(model.named_parameters(), table, SPEC.shape(config), 8192)
    assert round(found / 1e9, 1) == 57.9
    for parameter in model.layers.parameters():
        parameter.requires_grad_(False)
    frozen = flops_per_token(model.named_parameters(), table, SPEC.shape(config), 8192)
    blocks = sum(p.numel() for p in model.layers.parameters() if p.dim() > 1)
    assert found - frozen == 2 * blocks


NAMES = ["tok_embeddings.weight", "layers.0.w.weight", "layers.1.w.weight"]
ROWS = (Rule("tok_embeddings.weight", ones, "embedding"), Rule("layers.*.w.weight", ones, "column"))


def test_table_must_cover_every_parameter_once():
    assert assign(ROWS, NAMES, ties={}).keys() == set(NAMES)
    for rows, names, ties, says in (
        (ROWS, [*NAMES, "norm.weight"], {}, "norm.weight matches no row"),
        (
            (*ROWS, Rule("norm.weight", ones, "norm")),
            NAMES,
            {},
            "the row norm.weight matches no parameter",
        ),
        (
            (*ROWS, Rule("layers.1.w.weight", ones, "row")),
            NAMES,
            {},
            "layers.1.w.weight matches several rows",
        ),
        (
            (Rule(NAMES[0], ones, "embeding"), ROWS[1]),  # type: ignore
            NAMES,
            {},
            'role "embeding"; legal: embedding, column',
        ),
        (
            ROWS,
            NAMES,
            {"output.weight": "tok_embeddings.weight"},
            "output.weight shares its tensor with tok_embed",
        ),
    ):
        with pytest.raises(UserError, match="does not cover") as caught:
            assign(rows, names, ties=ties)
        assert says in str(caught.value)


def test_earlier_names_are_accepted():
    assert Rule("layers.*.bias", ones, "whole").tensor == "replicated"  # type: ignore[bad-argument-type]
    assert (registry.Step, registry.Part, registry.Shape) == (
        registry.WeightTransform,
        registry.FusedSlice,
        registry.ModelDims,
    )


def test_unknown_model_is_refused_with_a_suggestion():
    with pytest.raises(UserError, match="did you mean llama3"):
        get_model("lama3")
    with pytest.raises(UserError, match='"llama4"; known: gpt2, llama3'):  # another architecture
        get_model("llama4")
    assert get_model("llama3") is SPEC and register_model(SPEC) is SPEC
