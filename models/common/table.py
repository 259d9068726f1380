"""What Llama and its kin share: rows of their tables, and keys of their config.json.

No torch here.
"""

from dataclasses import replace

from titanlite.registry import Init, Role, Rotary, Rule, normal, ones

_INTO = normal(0.02)
_OUT_OF = normal(0.02, by_depth=True)
"""Of layers that write into the residual stream: they start smaller the deeper they are."""
GATED: tuple[tuple[str, Init, Role, str], ...] = (
    ("w1", _INTO, "column", "gate_proj"),
    ("w2", _OUT_OF, "row", "down_proj"),
    ("w3", _INTO, "column", "up_proj"),
)
"""The matrices of SwiGLU and of Experts, and their names at Hugging Face."""

HF_KEYS = {"dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads"}
HF_KEYS |= {
    "n_kv_heads": "num_key_value_heads",
    "hidden_dim": "intermediate_size",
    "vocab_size": "vocab_size",
}
HF_KEYS |= {
    "max_seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
}
HF_KEYS |= {"tied": "tie_word_embeddings"}


def decoder_rules(dim: int, heads: int, kv_heads: int, tied: bool) -> tuple[Rule, ...]:
    """Return the rows of all modules except those after a block's attention."""
    block, hf, q_heads, k_heads = (
        "layers.*.",
        "model.layers.*.",
        (Rotary(heads),),
        (Rotary(kv_heads),),
    )
    table = (
        Rule("tok_embeddings.weight", normal(1.0), "embedding", "model.embed_tokens.weight"),
        Rule(block + "attention_norm.weight", ones, "norm", hf + "input_layernorm.weight"),
        Rule(
            block + "attention.wq.weight", _INTO, "column", hf + "self_attn.q_proj.weight", q_heads
        ),
        Rule(
            block + "attention.wk.weight", _INTO, "column", hf + "self_attn.k_proj.weight", k_heads
        ),
        Rule(block + "attention.wv.weight", _INTO, "column", hf + "self_attn.v_proj.weight"),
        Rule(block + "attention.wo.weight", _OUT_OF, "row", hf + "self_attn.o_proj.weight"),
        Rule(block + "ffn_norm.weight", ones, "norm", hf + "post_attention_layernorm.weight"),
        Rule("norm.weight", ones, "norm", "model.norm.weight"),
    )
    if tied:  # the embedding is the output layer as well
        return (replace(table[0], init=_INTO, tied="output.weight"), *table[1:])
    return (*table, Rule("output.weight", normal(dim**-0.5), "head", "lm_head.weight"))


def feed_forward_rules() -> tuple[Rule, ...]:
    """Return the rows of SwiGLU in every block."""
    ours, theirs = "layers.*.feed_forward.", "model.layers.*.mlp."
    return tuple(
        Rule(f"{ours}{w}.weight", init, role, f"{theirs}{hf}.weight") for w, init, role, hf in GATED
    )
