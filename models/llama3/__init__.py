"""Llama 3: flavors, and the table with a row per parameter pattern."""

from dataclasses import dataclass

from titanlite.models.common import Epsilon, RopeScaling, Scale, Size
from titanlite.models.common.table import decoder_rules, feed_forward_rules
from titanlite.models.llama3.hf import HF
from titanlite.registry import ModelDims, ModelSpec, Rule, register_model


@dataclass(frozen=True)
class LlamaConfig:
    dim: Size
    n_layers: Size
    n_heads: Size
    n_kv_heads: Size
    hidden_dim: Size
    vocab_size: Size = 128256
    max_seq_len: Size = 131072
    rope_theta: Scale = 500000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: Epsilon = 1e-5
    tied: bool = False
    """The output layer shares the embedding's weight."""

    def __post_init__(self) -> None:
        if self.dim % (2 * self.n_heads):
            raise ValueError(f"dim {self.dim} must be a multiple of 2 x n_heads {self.n_heads}")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_heads {self.n_heads} must be a multiple of n_kv_heads {self.n_kv_heads}"
            )

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads


FLAVORS = {
    "debugmodel": LlamaConfig(
        128, 4, 8, 4, 384, vocab_size=256, max_seq_len=8192, rope_theta=10000.0
    ),
    "1B": LlamaConfig(2048, 16, 32, 8, 8192, rope_scaling=RopeScaling(factor=32.0), tied=True),
    "3B": LlamaConfig(3072, 28, 24, 8, 8192, rope_scaling=RopeScaling(factor=32.0), tied=True),
    "8B": LlamaConfig(4096, 32, 32, 8, 14336, rope_scaling=RopeScaling()),
    "70B": LlamaConfig(8192, 80, 64, 8, 28672, rope_scaling=RopeScaling()),
    "405B": LlamaConfig(16384, 126, 128, 8, 53248, rope_scaling=RopeScaling()),
}


def shape(c: LlamaConfig) -> ModelDims:
    return ModelDims(c.n_layers, c.n_heads, c.n_kv_heads, c.head_dim, c.vocab_size, c.max_seq_len)


def parameters(c: LlamaConfig) -> int:
    attention = 2 * c.dim * (c.dim + c.n_kv_heads * c.head_dim)
    block = attention + 3 * c.dim * c.hidden_dim + 2 * c.dim
    return (2 - c.tied) * c.vocab_size * c.dim + c.n_layers * block + c.dim


def rules(c: LlamaConfig) -> tuple[Rule, ...]:
    return (*decoder_rules(c.dim, c.n_heads, c.n_kv_heads, c.tied), *feed_forward_rules())


SPEC = register_model(
    ModelSpec(
        "llama3",
        FLAVORS,
        shape,
        rules,
        build="titanlite.models.llama3.model:Llama",
        core="attention.core",
        hf=HF,
        parameters=parameters,
    )
)
