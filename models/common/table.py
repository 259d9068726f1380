"""Rows that the tables of Llama and similar models share.

Imports no torch.
"""

from dataclasses import replace

from titanlite.registry import Init, Role, Rotary, Rule, normal, ones

_READS = normal(0.02)
"""For matrices that read the residual stream."""
_WRITES = normal(0.02, by_depth=True)
"""For wo and w2, which add to it: divided by sqrt(2 x (layer + 1))."""
GATED: tuple[tuple[str, Init, Role, str], ...] = (
    ("w1", _READS, "column", "gate_proj"),
    ("w2", _WRITES, "row", "down_proj"),
    ("w3", _READS, "column", "up_proj"),
)
"""The matrices of SwiGLU and of Experts, with their Hugging Face names."""


def decoder_rules(dim: int, heads: int, kv_heads: int, tied: bool) -> tuple[Rule, ...]:
    """Return the rows of all modules except those after a block's attention."""
    block = "layers.*."
    hf = "model.layers.*."
    q_heads = (Rotary(heads),)
    k_heads = (Rotary(kv_heads),)
    table = (
        Rule("tok_embeddings.weight", normal(1.0), "embedding", "model.embed_tokens.weight"),
        Rule(block + "attention_norm.weight", ones, "norm", hf + "input_layernorm.weight"),
        Rule(
            block + "attention.wq.weight", _READS, "column", hf + "self_attn.q_proj.weight", q_heads
        ),
        Rule(
            block + "attention.wk.weight", _READS, "column", hf + "self_attn.k_proj.weight", k_heads
        ),
        Rule(block + "attention.wv.weight", _READS, "column", hf + "self_attn.v_proj.weight"),
        Rule(block + "attention.wo.weight", _WRITES, "row", hf + "self_attn.o_proj.weight"),
        Rule(block + "ffn_norm.weight", ones, "norm", hf + "post_attention_layernorm.weight"),
        Rule("norm.weight", ones, "norm", "model.norm.weight"),
    )
    if tied:  # the embedding is also the output layer
        return (replace(table[0], init=_READS, tied="output.weight"), *table[1:])
    return (*table, Rule("output.weight", normal(dim**-0.5), "head", "lm_head.weight"))


def feed_forward_rules() -> tuple[Rule, ...]:
    """Return the rows of SwiGLU in every block."""
    ours = "layers.*.feed_forward."
    theirs = "model.layers.*.mlp."
    return tuple(
        Rule(f"{ours}{w}.weight", init, role, f"{theirs}{hf}.weight") for w, init, role, hf in GATED
    )
