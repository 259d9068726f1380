"""Qwen 3, dense and with experts: flavors, and the table of what the framework needs to know of each parameter."""

from dataclasses import dataclass, replace

from titanlite.models.common import Balance
from titanlite.registry import ModelDims, ModelSpec, Rotary, Rule, normal, ones, register_model


@dataclass(frozen=True)
class QwenConfig:
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    hidden_dim: int
    """The width of a feed-forward layer; unused in blocks with experts, as in Hugging Face's config.json."""
    expert_dim: int = 0
    """The width of an expert."""
    experts: int = 0
    top_k: int = 8
    """The number of experts that a token meets."""
    normalize: bool = True
    """The weights of a token's experts sum to one."""
    balance: Balance = "sequence"
    head_dim: int = 128
    vocab_size: int = 151936
    max_seq_len: int = 40960
    rope_theta: float = 1000000.0
    norm_eps: float = 1e-6
    tied: bool = False
    """The output layer shares the embedding's weight."""

    def __post_init__(self) -> None:
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads {self.n_heads} must be a multiple of n_kv_heads {self.n_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} must be even")
        if self.experts and not (0 < self.top_k <= self.experts and self.expert_dim > 0):
            raise ValueError(
                f"with experts {self.experts}, top_k {self.top_k} must be from 1 to {self.experts}, "
                f"and expert_dim {self.expert_dim} at least 1"
            )


_DEBUG = QwenConfig(128, 4, 8, 4, 384, head_dim=32, vocab_size=256, max_seq_len=8192, rope_theta=10000.0)
FLAVORS = {
    "debugmodel": _DEBUG,
    "debugmodel_moe": replace(_DEBUG, expert_dim=64, experts=8, top_k=2),
    "0.6B": QwenConfig(1024, 28, 16, 8, 3072, tied=True),
    "1.7B": QwenConfig(2048, 28, 16, 8, 6144, tied=True),
    "4B": QwenConfig(2560, 36, 32, 8, 9728, tied=True),
    "8B": QwenConfig(4096, 36, 32, 8, 12288),
    "14B": QwenConfig(5120, 40, 40, 8, 17408),
    "32B": QwenConfig(5120, 64, 64, 8, 25600),
    "30B-A3B": QwenConfig(2048, 48, 32, 4, 6144, expert_dim=768, experts=128),
    "235B-A22B": QwenConfig(4096, 94, 64, 4, 12288, expert_dim=1536, experts=128),
}


def shape(c: QwenConfig) -> ModelDims:
    return ModelDims(c.n_layers, c.n_heads, c.n_kv_heads, c.head_dim, c.vocab_size, c.max_seq_len, c.experts)


def parameters(c: QwenConfig, used: int | None = None) -> int:
    """Return the number of parameters, with all experts or with `used` ones."""
    attention = 2 * c.dim * (c.n_heads + c.n_kv_heads) * c.head_dim + 2 * c.head_dim
    experts = c.experts * c.dim + 3 * c.dim * c.expert_dim * (c.experts if used is None else used)
    block = attention + (experts if c.experts else 3 * c.dim * c.hidden_dim) + 2 * c.dim
    return (2 - c.tied) * c.vocab_size * c.dim + c.n_layers * block + c.dim


def rules(c: QwenConfig) -> tuple[Rule, ...]:
    """Return the table. Layers that write into the residual stream start smaller the deeper they are."""
    into, out_of = normal(0.02), normal(0.02, by_depth=True)
    block, hf = "layers.*.", "model.layers.*."
    q_heads, kv_heads, one = (Rotary(c.n_heads),), (Rotary(c.n_kv_heads),), (Rotary(1),)
    table = (
        Rule("tok_embeddings.weight", into if c.tied else normal(1.0), "embedding", "model.embed_tokens.weight"),
        Rule(block + "attention_norm.weight", ones, "norm", hf + "input_layernorm.weight"),
        Rule(block + "attention.wq.weight", into, "column", hf + "self_attn.q_proj.weight", q_heads),
        Rule(block + "attention.wk.weight", into, "column", hf + "self_attn.k_proj.weight", kv_heads),
        Rule(block + "attention.wv.weight", into, "column", hf + "self_attn.v_proj.weight"),
        Rule(block + "attention.wo.weight", out_of, "row", hf + "self_attn.o_proj.weight"),
        Rule(block + "attention.q_norm.weight", ones, "replicated", hf + "self_attn.q_norm.weight", one),
        Rule(block + "attention.k_norm.weight", ones, "replicated", hf + "self_attn.k_norm.weight", one),
        Rule(block + "ffn_norm.weight", ones, "norm", hf + "post_attention_layernorm.weight"),
        Rule("norm.weight", ones, "norm", "model.norm.weight"),
    )
    names = {"w1": (into, "gate_proj"), "w2": (out_of, "down_proj"), "w3": (into, "up_proj")}
    if c.experts:
        moe = block + "moe.", hf + "mlp."
        table += (Rule(moe[0] + "router.weight", into, "replicated", moe[1] + "gate.weight"),)
        for w, (init, name) in names.items():
            stacked = f"{moe[1]}experts.#.{name}.weight"
            table += (Rule(f"{moe[0]}experts.{w}", init, "expert", stacked, active=c.top_k / c.experts),)
    else:
        for w, (init, name) in names.items():
            role = "row" if w == "w2" else "column"
            table += (Rule(f"{block}feed_forward.{w}.weight", init, role, f"{hf}mlp.{name}.weight"),)
    if c.tied:  # the embedding is the output layer as well
        return (replace(table[0], tied="output.weight"), *table[1:])
    return (*table, Rule("output.weight", normal(c.dim**-0.5), "head", "lm_head.weight"))


_PATHS = {"build": "titanlite.models.qwen3.model:Qwen", "core": "attention.core"}
SPEC = register_model(ModelSpec("qwen3", FLAVORS, shape, rules, **_PATHS, parameters=parameters))
