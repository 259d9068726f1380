"""Qwen 3, dense and with experts: flavors, and the table with a row per parameter pattern."""

from dataclasses import dataclass, fields, replace
from typing import Literal

from titanlite.models.common import BalanceMethod, Epsilon, Scale, Size
from titanlite.models.common.table import GATED, decoder_rules, feed_forward_rules
from titanlite.models.qwen3.hf import HF
from titanlite.registry import (
    ModelDims,
    ModelSpec,
    Rotary,
    Rule,
    TorchTitan,
    normal,
    ones,
    register_model,
)

ONLY_WITH_EXPERTS = ("expert_dim", "top_k", "normalize", "balance")


@dataclass(frozen=True)
class QwenConfig:
    dim: Size
    n_layers: Size
    n_heads: Size
    n_kv_heads: Size
    hidden_dim: Size
    """The width of a feed-forward layer; unused in blocks with experts, as in Hugging Face's
    config.json.
    """
    expert_dim: Size | Literal[0] = 0
    """The width of an expert."""
    experts: Size | Literal[0] = 0
    top_k: Size = 8
    """The number of experts per token."""
    normalize: bool = True
    """The weights of a token's experts sum to one."""
    balance: BalanceMethod = "sequence"
    head_dim: Size = 128
    vocab_size: Size = 151936
    max_seq_len: Size = 40960
    rope_theta: Scale = 1000000.0
    norm_eps: Epsilon = 1e-6
    tied: bool = False
    """The output layer shares the embedding's weight."""

    def __post_init__(self) -> None:
        idle = []
        for f in fields(self):
            if f.name in ONLY_WITH_EXPERTS and getattr(self, f.name) != f.default:
                idle.append(f.name)
        if idle and not self.experts:
            raise ValueError(f"{', '.join(idle)}: no effect without experts")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_heads {self.n_heads} must be a multiple of n_kv_heads {self.n_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} must be even")
        if self.experts and not (0 < self.top_k <= self.experts and self.expert_dim > 0):
            raise ValueError(
                f"with experts {self.experts}, top_k {self.top_k} must be "
                f"from 1 to {self.experts}, and expert_dim {self.expert_dim} at least 1"
            )


_DEBUG = QwenConfig(
    128, 4, 8, 4, 384, head_dim=32, vocab_size=256, max_seq_len=8192, rope_theta=10000.0
)
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
    return ModelDims(
        c.n_layers, c.n_heads, c.n_kv_heads, c.head_dim, c.vocab_size, c.max_seq_len, c.experts
    )


def parameters(c: QwenConfig) -> int:
    attention = 2 * c.dim * (c.n_heads + c.n_kv_heads) * c.head_dim + 2 * c.head_dim
    feed_forward = 3 * c.dim * c.hidden_dim
    if c.experts:
        feed_forward = c.experts * c.dim * (1 + 3 * c.expert_dim)
    block = attention + feed_forward + 2 * c.dim
    return (2 - c.tied) * c.vocab_size * c.dim + c.n_layers * block + c.dim


def active_parameters(c: QwenConfig) -> int:
    others = max(c.experts - c.top_k, 0)
    return parameters(c) - c.n_layers * 3 * others * c.dim * c.expert_dim


def rules(c: QwenConfig) -> tuple[Rule, ...]:
    ours = "layers.*."
    theirs = "model.layers.*."
    norms = tuple(
        Rule(
            f"{ours}attention.{name}.weight",
            ones,
            "replicated",
            f"{theirs}self_attn.{name}.weight",
            (Rotary(1),),
        )
        for name in ("q_norm", "k_norm")
    )
    common = (*decoder_rules(c.dim, c.n_heads, c.n_kv_heads, c.tied), *norms)
    if not c.experts:
        return (*common, *feed_forward_rules())
    ours += "moe."
    theirs += "mlp."
    active = c.top_k / c.experts
    router = Rule(ours + "router.weight", normal(0.02), "replicated", theirs + "gate.weight")
    experts = (
        Rule(f"{ours}experts.{w}", init, "expert", f"{theirs}experts.#.{hf}.weight", active=active)
        for w, init, _, hf in GATED
    )
    return (*common, router, *experts)


def idle(c: QwenConfig) -> dict[str, str]:
    if c.experts:
        return {"hidden_dim": "if all layers have experts"}
    return {}


def torchtitan(c: QwenConfig) -> TorchTitan:
    """Return TorchTitan 0.2.2's form: all its routers have a bias, which nothing moves."""
    bias = "moe.expert_bias"
    zeros = {}
    if c.experts and c.balance != "bias":
        zeros = {f"layers.{i}.{bias}": (c.experts,) for i in range(c.n_layers)}
    names = {"moe.router.weight": "moe.router.gate.weight", "moe.router.bias": bias}
    return TorchTitan(names, rotates_halves=True, zeros=zeros)


SPEC = register_model(
    ModelSpec(
        "qwen3",
        FLAVORS,
        shape,
        rules,
        build="titanlite.models.qwen3.model:Qwen",
        core="attention.core",
        hf=HF,
        torchtitan=torchtitan,
        parameters=parameters,
        active_parameters=active_parameters,
        idle=idle,
    )
)
