"""Llama 3: flavors, its table, and its config.json at Hugging Face."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from titanlite.models.common import Epsilon, RopeScaling, Scale, Size
from titanlite.models.common.table import HF_KEYS, decoder_rules, feed_forward_rules
from titanlite.registry import HuggingFace, ModelDims, ModelSpec, Rule, register_model


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


HF_ROPE = {name: name for name in ("factor", "low_freq_factor", "high_freq_factor")}
HF_ROPE["original_positions"] = "original_max_position_embeddings"


def hf_config(c: LlamaConfig) -> dict[str, Any]:
    """Return the config.json of a LlamaForCausalLM, for transformers 4 and 5."""
    scaling = (
        {key: getattr(c.rope_scaling, name) for name, key in HF_ROPE.items()}
        if c.rope_scaling
        else None
    )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{key: getattr(c, name) for name, key in HF_KEYS.items()},
        "head_dim": c.head_dim,
        "rope_scaling": scaling and {"rope_type": "llama3", **scaling},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }


def hf_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of transformers' LlamaConfig for the keys that a config.json lacks."""
    hidden, heads = config.get("hidden_size", 4096), config.get("num_attention_heads", 32)
    sizes = {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
    }
    attention = {
        "num_attention_heads": 32,
        "num_key_value_heads": heads,
        "head_dim": hidden // heads,
    }
    absent = {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False}
    return {
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        **sizes,
        **attention,
        **absent,
    }


HF_FIELDS = HF_KEYS | {
    f"rope_scaling.{name}": f"rope_scaling.{key}" for name, key in HF_ROPE.items()
}
HF = HuggingFace(
    hf_config, ("max_position_embeddings",), ("*.rotary_emb.inv_freq",), hf_defaults, HF_FIELDS
)
_PATHS = {"build": "titanlite.models.llama3.model:Llama", "core": "attention.core"}
SPEC = register_model(
    ModelSpec("llama3", FLAVORS, shape, rules, **_PATHS, hf=HF, parameters=parameters)
)
