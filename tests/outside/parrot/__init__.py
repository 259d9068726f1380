"""A model in a user's own package: registered by `[model] package = "parrot"`, no edit in
titanlite.

It has what llama3 lacks: biases, dropout, LayerNorm.
"""

from dataclasses import dataclass

from titanlite.registry import ModelDims, ModelSpec, Rule, normal, ones, register_model, zeros


@dataclass(frozen=True)
class ParrotConfig:
    dim: int = 16
    n_layers: int = 2
    vocab_size: int = 256
    dropout: float = 0.1


def rules(c: ParrotConfig) -> tuple[Rule, ...]:
    return (
        Rule("tok_embeddings.weight", normal(0.5), "embedding"),
        Rule("layers.*.norm.weight", ones, "norm"),
        Rule("layers.*.norm.bias", zeros, "norm"),
        Rule("layers.*.up.weight", normal(0.1), "column"),
        Rule("layers.*.up.bias", zeros, "column"),
        Rule("layers.*.down.weight", normal(0.1, by_depth=True), "row"),
        Rule("layers.*.down.bias", zeros, "replicated"),
        Rule("output.weight", normal(0.1), "head"),
    )


SPEC = register_model(
    ModelSpec(
        name="parrot",
        flavors={"small": ParrotConfig()},
        shape=lambda c: ModelDims(c.n_layers, 1, 1, c.dim, c.vocab_size, max_seq_len=1024),
        rules=rules,
        build="parrot.model:Parrot",
        after=("output",),
    )
)
