"""A model in a user's package: its own experts, sigmoid scores, a shared expert, and a first block
without.
"""

from dataclasses import dataclass

from titanlite.models.common import BalanceMethod
from titanlite.models.common.table import decoder_rules
from titanlite.registry import ModelDims, ModelSpec, Rule, normal, register_model


@dataclass(frozen=True)
class MixedConfig:
    dim: int = 16
    n_layers: int = 2
    n_heads: int = 2
    expert_dim: int = 8
    experts: int = 4
    top_k: int = 2
    vocab_size: int = 256
    balance: BalanceMethod = "bias"


def rules(c: MixedConfig) -> tuple[Rule, ...]:
    init, mixture = normal(0.1), "layers.*.mixture."
    return (
        *decoder_rules(c.dim, c.n_heads, c.n_heads, tied=False),
        Rule("layers.*.dense.up.weight", init, "column"),
        Rule("layers.*.dense.down.weight", init, "row"),
        Rule(mixture + "router.weight", normal(0.5), "replicated"),
        Rule(mixture + "shared.up.weight", init, "column"),
        Rule(mixture + "shared.down.weight", init, "row"),
        Rule(mixture + "experts.up", init, "expert", active=c.top_k / c.experts),
        Rule(mixture + "experts.down", init, "expert", active=c.top_k / c.experts),
    )


SPEC = register_model(
    ModelSpec(
        name="mixed",
        flavors={"small": MixedConfig()},
        shape=lambda c: ModelDims(
            c.n_layers,
            c.n_heads,
            c.n_heads,
            c.dim // c.n_heads,
            c.vocab_size,
            1024,
            c.experts,
            dense_layers=1,
        ),
        rules=rules,
        build="mixed.model:Mixed",
        core="attention.core",
    )
)
