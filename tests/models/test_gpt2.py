"""GPT-2: the dropout of transformers' model, and initial values."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.jobs import job
from tests.messages import refused
from tests.models import small
from tests.parallel.rows import GPT2  # noqa: F401  tests/train has it from here
from titanlite.checkpoint.hf.load import HuggingFaceFolder
from titanlite.models.gpt2 import SPEC, GPT2Config


def test_dropout_is_that_of_transformers_gpt2(tmp_path):
    """From the same random state it falls on the same places in training, and is off in evaluation;
    tests/checkpoint/test_huggingface.py compares models without it.
    """
    from transformers import GPT2Config as HFConfig
    from transformers import GPT2LMHeadModel

    config = dataclasses.replace(small.GPT2, dropout=0.5)
    theirs = GPT2LMHeadModel(HFConfig(**SPEC.hf.config(config)))
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    theirs.save_pretrained(tmp_path)
    folder = HuggingFaceFolder(tmp_path, SPEC, config)
    own = small.built(SPEC, config)[0].requires_grad_(False)
    for name, parameter in own.named_parameters():
        parameter.copy_(folder.read(name))
    tokens, logits = small.tokens(2, 64), dict[bool, torch.Tensor]()
    for training in (False, True):
        torch.manual_seed(0)
        logits[training] = own.train(training)(tokens)
        torch.manual_seed(0)
        expected = theirs.train(training)(tokens).logits
        assert (logits[training] - expected).abs().max().item() <= 1e-5, f"training {training}"
    assert (logits[False] - logits[True]).abs().max() > 0.5


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
