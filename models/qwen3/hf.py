"""Qwen 3's config.json for Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from titanlite.models.common.hf import HF_KEYS
from titanlite.registry import HuggingFace

if TYPE_CHECKING:
    from titanlite.models.qwen3 import QwenConfig

_MOE_KEYS = {
    "expert_dim": "moe_intermediate_size",
    "experts": "num_experts",
    "top_k": "num_experts_per_tok",
    "normalize": "norm_topk_prob",
}
_KEYS = {**HF_KEYS, "head_dim": "head_dim", **_MOE_KEYS}


def hf_config(c: QwenConfig) -> dict[str, Any]:
    """Return the config.json of a Qwen3ForCausalLM or Qwen3MoeForCausalLM, for transformers 4 and
    5.
    """
    config: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    keys = {**HF_KEYS, "head_dim": "head_dim"}
    if c.experts:
        config = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
        keys = _KEYS
    config |= {key: getattr(c, name) for name, key in keys.items()}
    if c.experts:
        config |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
    return config | {
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
    }


def hf_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of transformers' Qwen3Config or Qwen3MoeConfig for the keys that a
    config.json lacks.
    """
    absent = {
        "vocab_size": 151936,
        "num_attention_heads": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
    }
    absent |= {"rope_theta": 10000.0, "attention_bias": False, "use_sliding_window": False}
    absent |= {"tie_word_embeddings": False}
    if config.get("model_type") != "qwen3_moe":
        sizes = {
            "hidden_size": 4096,
            "intermediate_size": 22016,
            "num_hidden_layers": 32,
            "head_dim": 128,
        }
        return {**absent, **sizes, "num_key_value_heads": 32}
    head_dim = config.get("hidden_size", 2048) // config.get("num_attention_heads", 32)
    sizes = {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "head_dim": head_dim,
    }
    experts = {"moe_intermediate_size": 768, "num_experts": config.get("num_local_experts", 128)}
    experts |= {
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    return {**absent, **sizes, "num_key_value_heads": 4, **experts}


_UNCHECKED = (
    "max_position_embeddings",
    "num_local_experts",
    "router_aux_loss_coef",
    "sliding_window",
)
_UNCHECKED += ("max_window_layers", "layer_types")  # no effect without use_sliding_window
HF = HuggingFace(hf_config, unchecked_config_keys=_UNCHECKED, defaults=hf_defaults, fields=_KEYS)
