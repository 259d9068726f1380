"""GPT-2's config.json for Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from titanlite.registry import HuggingFace

if TYPE_CHECKING:
    from titanlite.models.gpt2 import GPT2Config


def hf_config(c: GPT2Config) -> dict[str, Any]:
    """Return the config.json of a GPT2LMHeadModel."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": c.dim,
        "n_layer": c.n_layers,
        "n_head": c.n_heads,
        "n_inner": None,
        "n_positions": c.max_seq_len,
        "vocab_size": c.vocab_size,
        "layer_norm_epsilon": c.norm_eps,
        "activation_function": "gelu_new",
        **dict.fromkeys(_DROPOUTS, c.dropout),
        "tie_word_embeddings": True,
    }


def hf_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of transformers' GPT2Config for the keys that a config.json lacks."""
    sizes = {"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12}
    scales = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}
    rest = {
        "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
    }
    return {"n_inner": 4 * config.get("n_embd", 768), **sizes, **scales, **rest}


_DROPOUTS = ("embd_pdrop", "attn_pdrop", "resid_pdrop")
_FIELDS = {
    "dim": "n_embd",
    "n_layers": "n_layer",
    "n_heads": "n_head",
    "max_seq_len": "n_positions",
    "vocab_size": "vocab_size",
    "norm_eps": "layer_norm_epsilon",
    "dropout": "resid_pdrop",
}
HF = HuggingFace(
    hf_config,
    unchecked_config_keys=_DROPOUTS,
    ignored_tensors=("*.attn.bias", "*.attn.masked_bias"),
    defaults=hf_defaults,
    fields=_FIELDS,
)
