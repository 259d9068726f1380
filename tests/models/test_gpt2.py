"""GPT-2: published sizes, logits of transformers' model with and without dropout, FLOPs and
reproducibility.
"""

import dataclasses
import warnings

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.jobs import QUIET, job, run_to_end
from titanlite.checkpoint.hf.names import Translation
from titanlite.config.load import ConfigError
from titanlite.models.gpt2 import FLAVORS, SPEC, GPT2Config
from titanlite.observe.throughput import flops_per_token
from titanlite.parallel.build import shared_names
from titanlite.parallel.init import fill, materialize
from titanlite.registry import assign, normal

PUBLISHED = {"124M": 124_439_808, "350M": 354_823_168, "774M": 774_030_080, "1.5B": 1_557_611_200}
SMALL = GPT2Config(32, 2, 4, vocab_size=99, max_seq_len=64, dropout=0.0)
GPT2 = [
    *QUIET,
    "--model.name=gpt2",
    *(f"--model.overrides.{f}" for f in "dim=16 n_layers=2 n_heads=2".split()),
]


def build(config: GPT2Config = SMALL):
    """Return the model with its initial values, and its table."""
    with torch.device("meta"):
        model = SPEC.module(config, 16)
    table = assign(
        SPEC.rules(config), [n for n, _ in model.named_parameters()], ties=shared_names(model)
    )
    materialize(model, table, 0, torch.device("cpu"))
    return model, table


def build_random(config: GPT2Config = SMALL):
    """Return a model whose biases matter, whose logits are of order 1, and on which GELU's two
    forms differ.
    """
    model, table = build(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            fill(parameter, name, normal(0.3), seed=1)
    return model, table


def weights(model) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def some_tokens(*size: int) -> torch.Tensor:
    return torch.randint(SMALL.vocab_size, size, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("flavor", PUBLISHED)
def test_flavor_has_the_published_parameter_count(flavor):
    with torch.device("meta"):
        model = SPEC.module(FLAVORS[flavor], 16)
    assert sum(p.numel() for p in model.parameters()) == PUBLISHED[flavor]
    assert SPEC.parameters and SPEC.parameters(FLAVORS[flavor]) == PUBLISHED[flavor]


def transformers_model(c: GPT2Config, weights: dict[str, torch.Tensor]):
    """Return transformers' GPT-2 with the same weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import GPT2Config as HFConfig
        from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel(
        HFConfig(
            n_embd=c.dim,
            n_layer=c.n_layers,
            n_head=c.n_heads,
            vocab_size=c.vocab_size,
            n_positions=c.max_seq_len,
            layer_norm_epsilon=c.norm_eps,
            embd_pdrop=c.dropout,
            attn_pdrop=c.dropout,
            resid_pdrop=c.dropout,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected
    model.tie_weights()
    return model


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_logits_equal_transformers_gpt2(dropout):
    """From the same random state, dropout falls on the same places in training, and is off in
    evaluation.
    """
    config = dataclasses.replace(SMALL, dropout=dropout)
    model, _ = build_random(config)
    ours = weights(model)
    hf_tensors = Translation(SPEC, config).hf_tensors(torch.float32)
    reference = transformers_model(
        config, {t.name: t.build([ours[name] for name in t.parameters]) for t in hf_tensors}
    )
    tokens = some_tokens(2, 64)
    logits = {}
    for training in (False, True):
        found = []
        for either in (model.train(training), reference.train(training)):
            torch.manual_seed(0)
            with torch.no_grad():
                out = either(tokens)
            found.append(out if either is model else out.logits)
        logits[training] = found[0]
        assert found[0].std() > 0.5
        assert (found[0] - found[1]).abs().max().item() <= 1e-5, f"training {training}"
    assert torch.equal(logits[False], logits[True]) == (dropout == 0)


def test_document_mask_equals_separate_documents():
    model, _ = build_random()
    lengths = [7, 1, 22]
    tokens = some_tokens(1, sum(lengths))
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)).unsqueeze(0)
    positions = torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0)
    with torch.no_grad():
        together = model(tokens, positions=positions, documents=documents)
        separate = torch.cat([model(part) for part in tokens.split(lengths, dim=1)], dim=1)
    assert (together - separate).abs().max() <= 1e-6


def test_stages_and_head_compose_to_the_model():
    """A pipeline stage lacks some modules; layers keep their global numbers."""
    model, _ = build_random()
    first, last = build_random()[0], build_random()[0]
    for stage, name in (
        (first, "norm"),
        (first, "output"),
        (last, "tok_embeddings"),
        (last, "pos_embeddings"),
    ):
        setattr(stage, name, None)
    del first.layers["1"], last.layers["0"]
    tokens = some_tokens(2, 8)
    with torch.no_grad():
        assert torch.equal(last(first(tokens), head=lambda h, output: -output(h)), -model(tokens))


def test_initial_values_are_those_of_gpt2():
    """Layers that write into the residual stream start smaller the more layers there are."""
    config = GPT2Config(256, 8, 4, vocab_size=999)
    model, _ = build(config)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            assert parameter.eq(1).all(), name
        elif name.endswith("bias"):
            assert parameter.eq(0).all(), name
        else:
            std = 0.02 / 4 if ".wo." in name or ".w2." in name else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.02), name


def test_flops_equal_the_flop_counter():
    """Positions are looked up and multiply nothing; the tied output multiplies once."""
    model, table = build()
    tokens = some_tokens(2, 32)
    math = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    with math, FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    expected = flops_per_token(model.named_parameters(), table, SPEC.shape(SMALL), 32)
    assert counter.get_total_flops() == expected * tokens.numel()


def test_two_runs_with_dropout_are_bit_equal(pool, tmp_path):
    runs = [
        pool.run(run_to_end, GPT2, str(tmp_path / str(i)), world=2)[0]["weights"] for i in range(2)
    ]
    without = [*GPT2, "--model.overrides.dropout=0.0"]
    other = pool.run(run_to_end, without, str(tmp_path / "without"), world=2)[0]["weights"]
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])
    assert not any(torch.equal(runs[0][name], other[name]) for name in other)


def test_sequence_longer_than_the_positions_is_refused():
    assert job(["--model.name=gpt2", "--training.seq_len=1024"], 1).positions == 1024
    with pytest.raises(ConfigError) as caught:
        job(["--model.name=gpt2", "--training.seq_len=2048"], 1)
    assert "training.seq_len = 2048" in str(caught.value) and "1024 tokens at most" in str(
        caught.value
    )
