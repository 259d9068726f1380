"""Small models of every kind, with values."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from tests.jobs import relative_error
from titanlite.models.gpt2 import GPT2Config
from titanlite.models.llama3 import LlamaConfig
from titanlite.models.qwen3 import QwenConfig
from titanlite.parallel.build import build_meta_model
from titanlite.parallel.init import fill, materialize
from titanlite.registry import ModelSpec, Rule, get_model, normal

VOCABULARY = 99
GPT2 = GPT2Config(32, 2, 4, vocab_size=VOCABULARY, max_seq_len=64, dropout=0.0)
LLAMA = LlamaConfig(32, 2, 4, 2, 48, vocab_size=VOCABULARY, max_seq_len=512, norm_eps=1e-5)
QWEN = QwenConfig(
    32, 2, 4, 2, 48, expert_dim=25, experts=4, top_k=2, head_dim=16, vocab_size=VOCABULARY
)
SMALL: dict[str, tuple[ModelSpec, Any]] = {
    "gpt2": (get_model("gpt2"), GPT2),
    "llama3": (get_model("llama3"), LLAMA),
    "llama3, tied": (get_model("llama3"), dataclasses.replace(LLAMA, tied=True)),
    "qwen3, experts": (get_model("qwen3"), QWEN),
}


def built(spec: ModelSpec, config: Any, positions: int = 64) -> tuple[Any, dict[str, Rule]]:
    """Return a model with its initial values, and its table."""
    model, table = build_meta_model(spec, config, positions)
    materialize(model, table, 0, torch.device("cpu"))
    return model, table


def random(spec: ModelSpec, config: Any) -> Any:
    """Return a model whose biases matter, and whose logits are of order 1."""
    model, _ = built(spec, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            fill(parameter, name, normal(0.3), seed=1)
    return model


def tokens(*size: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, size, generator=torch.Generator().manual_seed(0))


def require_apart(model: Any) -> None:
    """Require that three documents in a sequence have the outputs of each alone."""
    lengths = [7, 1, 22]
    given = tokens(1, sum(lengths))
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)).unsqueeze(0)
    positions = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)
    with torch.no_grad():
        together = model(given, positions, documents)
        apart = torch.cat([model(part) for part in given.split(lengths, dim=1)], dim=1)
        assert relative_error(together, apart) <= 1e-6
        assert relative_error(together, model(given)) > 1e-2
