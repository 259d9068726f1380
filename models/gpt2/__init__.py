"""GPT-2: flavors, and the table with a row per parameter pattern."""

from dataclasses import dataclass, replace

from titanlite.models.common import Epsilon, Size
from titanlite.models.gpt2.hf import HF
from titanlite.registry import (
    FusedSlice,
    Init,
    ModelDims,
    ModelSpec,
    Role,
    Rule,
    Transposed,
    normal,
    ones,
    register_model,
    zeros,
)


@dataclass(frozen=True)
class GPT2Config:
    dim: Size
    n_layers: Size
    n_heads: Size
    vocab_size: Size = 50257
    max_seq_len: Size = 1024
    norm_eps: Epsilon = 1e-5
    dropout: float = 0.1
    """Applies to the embedding, to attention probabilities, and to each layer's output to the
    residual stream.
    """

    def __post_init__(self) -> None:
        if self.dim % self.n_heads:
            raise ValueError(f"dim {self.dim} must be a multiple of n_heads {self.n_heads}")
        if not 0 <= self.dropout < 1:
            raise ValueError(
                f"dropout {self.dropout} must be a probability, at least 0 and less than 1"
            )

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads


FLAVORS = {
    "debugmodel": GPT2Config(128, 4, 8, vocab_size=256),
    "124M": GPT2Config(768, 12, 12),
    "350M": GPT2Config(1024, 24, 16),
    "774M": GPT2Config(1280, 36, 20),
    "1.5B": GPT2Config(1600, 48, 25),
}


def shape(c: GPT2Config) -> ModelDims:
    return ModelDims(c.n_layers, c.n_heads, c.n_heads, c.head_dim, c.vocab_size, c.max_seq_len)


def parameters(c: GPT2Config) -> int:
    # 4 matrices of attention, 2 that are 4 times as large, biases, two norms.
    block = 12 * c.dim**2 + 13 * c.dim
    return (c.vocab_size + c.max_seq_len + 2) * c.dim + c.n_layers * block


def rules(c: GPT2Config) -> tuple[Rule, ...]:
    """Return the table. The more layers write into the residual stream, the smaller they start."""
    reads = normal(0.02)
    writes = normal(0.02 / (2 * c.n_layers) ** 0.5)
    tokens = "transformer.wte.weight"
    positions = "transformer.wpe.weight"
    return (
        Rule("tok_embeddings.weight", reads, "embedding", tokens, tied="output.weight"),
        Rule("pos_embeddings.weight", reads, "embedding", positions),
        *_norm("layers.*.attention_norm", "transformer.h.*.ln_1"),
        *_third("attention.wq", 0, reads),
        *_third("attention.wk", 1, reads),
        *_third("attention.wv", 2, reads),
        *_linear("attention.wo", "attn.c_proj", writes, "row"),
        *_norm("layers.*.ffn_norm", "transformer.h.*.ln_2"),
        *_linear("feed_forward.w1", "mlp.c_fc", reads, "column"),
        *_linear("feed_forward.w2", "mlp.c_proj", writes, "row"),
        *_norm("norm", "transformer.ln_f"),
    )


def _norm(ours: str, theirs: str) -> tuple[Rule, Rule]:
    return (
        Rule(f"{ours}.weight", ones, "norm", f"{theirs}.weight"),
        Rule(f"{ours}.bias", zeros, "norm", f"{theirs}.bias"),
    )


def _linear(ours: str, theirs: str, init: Init, role: Role) -> tuple[Rule, Rule]:
    """Return the rows of a layer of every block. Hugging Face's matrix has a row per input."""
    bias: Role = "column"
    if role == "row":
        bias = "replicated"
    ours = f"layers.*.{ours}"
    theirs = f"transformer.h.*.{theirs}"
    return (
        Rule(f"{ours}.weight", init, role, f"{theirs}.weight", (Transposed(),)),
        Rule(f"{ours}.bias", zeros, bias, f"{theirs}.bias"),
    )


def _third(ours: str, index: int, init: Init) -> tuple[Rule, Rule]:
    """Return the rows of wq, wk or wv, which Hugging Face joins as columns of one matrix."""
    weight, bias = _linear(ours, "attn.c_attn", init, "column")
    return (
        replace(weight, part=FusedSlice(index, 3, dim=1)),
        replace(bias, part=FusedSlice(index, 3)),
    )


SPEC = register_model(
    ModelSpec(
        "gpt2",
        FLAVORS,
        shape,
        rules,
        build="titanlite.models.gpt2.model:GPT2",
        core="attention.core",
        before=("tok_embeddings", "pos_embeddings"),
        parameters=parameters,
        hf=HF,
    )
)
