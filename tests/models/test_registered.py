"""Registered models: published sizes, documents, and FLOPs."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.messages import refused
from tests.models.small import QWEN, SMALL, built, random, require_apart, tokens
from titanlite.observe.throughput import flops_per_token
from titanlite.parallel.build import build_meta_model
from titanlite.registry import get_model, register_model

PUBLISHED = {
    "gpt2 124M": 124_439_808,
    "gpt2 350M": 354_823_168,
    "gpt2 774M": 774_030_080,
    "gpt2 1.5B": 1_557_611_200,
    "llama3 1B": 1_235_814_400,
    "llama3 3B": 3_212_749_824,
    "llama3 8B": 8_030_261_248,
    "llama3 70B": 70_553_706_496,
    "llama3 405B": 405_853_388_800,
    "qwen3 0.6B": 596_049_920,
    "qwen3 1.7B": 1_720_574_976,
    "qwen3 4B": 4_022_468_096,
    "qwen3 8B": 8_190_735_360,
    "qwen3 14B": 14_768_307_200,
    "qwen3 32B": 32_762_123_264,
    "qwen3 30B-A3B": 30_532_122_624,
    "qwen3 235B-A22B": 235_093_634_560,
}


def test_flavors_have_the_published_numbers_of_parameters():
    """What is counted is what is built."""
    for title, expected in PUBLISHED.items():
        name, flavor = title.split()
        spec = get_model(name)
        model, _ = build_meta_model(spec, spec.flavors[flavor])
        assert sum(parameter.numel() for parameter in model.parameters()) == expected, title
        assert spec.parameters and spec.parameters(spec.flavors[flavor]) == expected, title


@pytest.mark.parametrize("name", SMALL)
def test_documents_are_kept_apart_as_if_each_were_alone(name):
    require_apart(random(*SMALL[name]))


TRAINED = ["", "output", "layers.1.|norm|output", "embeddings"]
"""Parts of the names that are trained; in the first all are."""


@pytest.mark.parametrize(
    ("name", "trained"),
    [(name, each) for name in SMALL for each in TRAINED[: None if "experts" not in name else 1]],
)
def test_flops_equal_the_flop_counter(name, trained):
    """Also where parts are frozen: nothing goes back below the first parameter that is trained.

    Under the math backend: torch's counter sees no FLOPs in the CPU's flash kernel. Experts count
    as far as a token meets them; the sum of their outputs, a product too, is left out.
    """
    spec, config = SMALL[name]
    model, table = built(spec, config)
    named = dict(model.named_parameters())
    chosen = [key for key in named if any(part in key for part in trained.split("|"))]
    for key in named.keys() - (chosen or ["tok_embeddings.weight"]):
        named[key].requires_grad_(False)
    given = tokens(2, 32)
    math = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    with math, FlopCounterMode(display=False) as counter:
        model(given).sum().backward()
    expected = flops_per_token(named.items(), table, spec.shape(config), 32, spec.blocks).total
    sums = 6 * config.n_layers * config.top_k * config.dim if config is QWEN else 0
    assert counter.get_total_flops() == (expected + sums) * given.numel()


def test_an_unknown_model_is_refused_with_those_that_there_are():
    with refused("llama4", "known: gpt2, llama3"):  # another architecture
        get_model("llama4")
    spec = get_model("llama3")
    assert register_model(spec) is spec
