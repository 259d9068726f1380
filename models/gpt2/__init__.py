"""GPT-2: flavors, and the table with a row per parameter pattern."""

from dataclasses import dataclass

from titanlite.models.common import Epsilon, Size
from titanlite.models.gpt2.hf import HF
from titanlite.registry import (
    FusedSlice,
    ModelDims,
    ModelSpec,
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
    """Return the table.

    The more layers write into the residual stream, the smaller they start.

    Hugging Face's matrices have a row per input, and queries, keys and values are columns of one
    matrix.
    """
    into = normal(0.02)
    out_of = normal(0.02 / (2 * c.n_layers) ** 0.5)
    transposed = (Transposed(),)
    block = "layers.*."
    hf = "transformer.h.*."
    table = [
        Rule(
            "tok_embeddings.weight",
            normal(0.02),
            "embedding",
            "transformer.wte.weight",
            tied="output.weight",
        ),
        Rule("pos_embeddings.weight", normal(0.02), "embedding", "transformer.wpe.weight"),
    ]
    for i, name in enumerate(("wq", "wk", "wv")):
        ours = f"{block}attention.{name}."
        fused = hf + "attn.c_attn."
        table += [
            Rule(
                ours + "weight",
                into,
                "column",
                fused + "weight",
                transposed,
                FusedSlice(i, 3, dim=1),
            ),
            Rule(ours + "bias", zeros, "column", fused + "bias", part=FusedSlice(i, 3)),
        ]
    for ours, theirs in (("attention.wo.", "attn.c_proj."), ("feed_forward.w2.", "mlp.c_proj.")):
        table += [
            Rule(block + ours + "weight", out_of, "row", hf + theirs + "weight", transposed),
            Rule(block + ours + "bias", zeros, "replicated", hf + theirs + "bias"),
        ]
    table += [
        Rule(block + "feed_forward.w1.weight", into, "column", hf + "mlp.c_fc.weight", transposed),
        Rule(block + "feed_forward.w1.bias", zeros, "column", hf + "mlp.c_fc.bias"),
    ]
    norms = {
        block + "attention_norm.": hf + "ln_1.",
        block + "ffn_norm.": hf + "ln_2.",
        "norm.": "transformer.ln_f.",
    }
    for ours, theirs in norms.items():
        table += [
            Rule(ours + "weight", ones, "norm", theirs + "weight"),
            Rule(ours + "bias", zeros, "norm", theirs + "bias"),
        ]
    return tuple(table)


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
