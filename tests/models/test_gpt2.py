"""GPT-2: logits of transformers' model with and without dropout, and initial values."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import torch

from tests.jobs import QUIET, job
from tests.messages import refused
from tests.models import small
from titanlite.checkpoint.hf.names import Translation
from titanlite.models.gpt2 import SPEC, GPT2Config

GPT2 = [
    *QUIET,
    "--model.name=gpt2",
    *(f"--model.overrides.{field}" for field in "dim=16 n_layers=2 n_heads=2".split()),
]


def transformers_model(config: GPT2Config, model: Any) -> Any:
    """Return transformers' GPT-2 with the same weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import GPT2Config as HFConfig
        from transformers import GPT2LMHeadModel

    weights = dict(model.named_parameters())
    translation = Translation(SPEC, config)
    state = {
        tensor.name: tensor.build([weights[name].detach() for name in tensor.parameters])
        for tensor in translation.hf_tensors(torch.float32)
    }
    theirs = GPT2LMHeadModel(HFConfig(**SPEC.hf.config(config)))
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected
    theirs.tie_weights()
    return theirs


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_logits_equal_transformers_gpt2(dropout):
    """From the same random state, dropout falls on the same places in training, and is off in
    evaluation.
    """
    config = dataclasses.replace(small.GPT2, dropout=dropout)
    model = small.random(SPEC, config)
    reference = transformers_model(config, model)
    tokens = small.tokens(2, 64)
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


def test_initial_values_are_those_of_gpt2():
    """Layers that write into the residual stream start smaller the more layers there are."""
    model, _ = small.built(SPEC, GPT2Config(256, 8, 4, vocab_size=999))
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            assert parameter.eq(1).all(), name
        elif name.endswith("bias"):
            assert parameter.eq(0).all(), name
        else:
            std = 0.02 / 4 if ".wo." in name or ".w2." in name else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.02), name


def test_a_sequence_longer_than_the_positions_is_refused():
    assert job(["--model.name=gpt2", "--training.seq_len=1024"], 1).positions == 1024
    with refused("training.seq_len = 2048", "1024"):
        job(["--model.name=gpt2", "--training.seq_len=2048"], 1)
