"""Llama 3's config.json for Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from titanlite.models.common.hf import HF_KEYS
from titanlite.registry import HuggingFace

if TYPE_CHECKING:
    from titanlite.models.llama3 import LlamaConfig

HF_ROPE = {name: name for name in ("factor", "low_freq_factor", "high_freq_factor")}
HF_ROPE["original_positions"] = "original_max_position_embeddings"


def hf_config(c: LlamaConfig) -> dict[str, Any]:
    """Return the config.json of a LlamaForCausalLM, for transformers 4 and 5."""
    scaling = None
    if c.rope_scaling:
        scaling = {key: getattr(c.rope_scaling, name) for name, key in HF_ROPE.items()}
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
    hidden = config.get("hidden_size", 4096)
    heads = config.get("num_attention_heads", 32)
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
    hf_config,
    unchecked_config_keys=("max_position_embeddings",),
    ignored_tensors=("*.rotary_emb.inv_freq",),
    defaults=hf_defaults,
    fields=HF_FIELDS,
)
