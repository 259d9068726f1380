"""A model in a user's package that tests tensor parallel: replicated parameters, norms inside of
attention.
"""

from dataclasses import dataclass

from titanlite.registry import ModelDims, ModelSpec, Rule, normal, ones, register_model, zeros


@dataclass(frozen=True)
class ScaledConfig:
    dim: int = 16
    n_layers: int = 2
    n_heads: int = 2
    vocab_size: int = 256


def rules(c: ScaledConfig) -> tuple[Rule, ...]:
    return (
        Rule("tok_embeddings.weight", normal(0.5), "embedding"),
        Rule("layers.*.scale", ones, "replicated"),
        Rule("layers.*.mix.q_norm.weight", ones, "norm"),
        Rule("layers.*.mix.wq.weight", normal(0.1), "column"),
        Rule("layers.*.mix.wv.weight", normal(0.1), "column"),
        Rule("layers.*.mix.temperature", ones, "replicated"),
        Rule("layers.*.mix.wo.weight", normal(0.1), "row"),
        Rule("layers.*.mix.wo.bias", zeros, "replicated"),
        Rule("output.weight", normal(0.1), "head"),
    )


SPEC = register_model(
    ModelSpec(
        name="scaled",
        flavors={"small": ScaledConfig()},
        shape=lambda c: ModelDims(
            c.n_layers, c.n_heads, c.n_heads, c.dim // c.n_heads, c.vocab_size, max_seq_len=1024
        ),
        rules=rules,
        build="scaled.model:Scaled",
        after=("output",),
    )
)
