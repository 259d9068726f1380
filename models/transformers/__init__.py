"""Any causal language model of transformers, trained without changes.

A flavor is the content of a config.json. Importing this imports neither torch nor transformers.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from titanlite.errors import UserError, nearest
from titanlite.models.transformers.flavor import flavor_of
from titanlite.registry import (
    Conversion,
    HuggingFace,
    ModelDims,
    ModelSpec,
    Rule,
    register_model,
)

_SIZES = {"hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 256}
_HEADS = {"num_attention_heads": 4, "intermediate_size": 128}
_FEWER = {**_HEADS, "num_key_value_heads": 2, "head_dim": 16}
_FALCON = {"num_attention_heads": 4, "ffn_hidden_size": 128}
_SCAN = {"num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 16}


_NEEDED = {
    "documents": ("training.document_mask", "its documents are not kept separate"),
    "chunks": ("training.loss_chunks", "its head computes different logits in chunks"),
    "compiles": ("compile.enable", "its blocks do not compile"),
    "buffers": ("model.name", "its buffers are not restored"),
    "causal": ("model.name", "it sees later tokens, so it is no causal model"),
}
"""For each question of the probe, the key that needs a "yes", and the fault otherwise."""


def _tiny(kind: str, sizes: Mapping[str, int], **more: int) -> Any:
    return flavor_of({"model_type": kind, **_SIZES, **sizes, **more})


FLAVORS = {
    "debugmodel": _tiny("llama", _FEWER),
    "qwen3": _tiny("qwen3", _FEWER),
    "mistral": _tiny("mistral", _FEWER, sliding_window=32),
    "gemma2": _tiny("gemma2", _FEWER, sliding_window=32),
    "gpt_neox": _tiny("gpt_neox", _HEADS),
    "falcon": _tiny("falcon", _FALCON),
    "mixtral": _tiny("mixtral", _FEWER, num_local_experts=4),
    "mamba2": _tiny("mamba2", _SCAN),
}


def library() -> ModuleType:
    """Return the module that imports transformers."""
    if find_spec("transformers") is None or int(version("transformers").split(".")[0]) < 5:
        raise UserError("needs transformers 5: pip install 'titanlite[hf]'")
    from titanlite.models.transformers import model

    return model


@dataclass(frozen=True)
class TransformersSpec(ModelSpec):
    """The spec of all classes; `of` returns one class's, with the names of its modules."""

    def configure(self, flavor: str, overrides: Mapping[str, Any]) -> Any:
        """Return the flavor's config.json with some keys replaced; "none" stands for null."""
        if flavor not in self.flavors and flavor != "hf":
            legal = [*self.flavors, "hf"]
            close = nearest(flavor, legal)
            hint = ""
            if close:
                hint = f'did you mean "{close}"? '
            raise UserError(f'unknown flavor "{flavor}"; {hint}legal: {", ".join(legal)}')
        values: dict[str, Any] = {}
        if flavor in self.flavors:
            values = dataclasses.asdict(self.flavors[flavor])
        if overrides.get("model_type", values.get("model_type")) != values.get("model_type"):
            values = {}  # another class has other sizes
        values = _merged(values, overrides)
        if not values.get("model_type"):
            raise UserError("model.overrides has no model_type; flavor hf takes a config.json")
        configured = flavor_of(values)
        library().module_names(as_json(configured))  # refuses a config that can't be built
        return configured

    def of(self, model_config: Any) -> ModelSpec:
        return replace(self, **library().module_names(as_json(model_config)))

    def limits(self, model_config: Any) -> dict[str, str]:
        answers = _answers(model_config)
        found: dict[str, str] = {}
        for question, (key, means) in _NEEDED.items():
            answer = answers[question]
            is_unknown = answer.startswith("unknown")
            if answer != "yes" and not (key == "model.name" and is_unknown):
                found[key] = f"{means}: on a small instance of the class, {answer}"
        return found

    def remark(self, model_config: Any) -> str:
        answers = [f"{name} {answer}" for name, answer in _answers(model_config).items()]
        return "a small instance of the class was tried: " + ", ".join(answers)

    def on_cpu(self) -> AbstractContextManager[None]:
        from titanlite.models.transformers.kernels import torch_functions

        return torch_functions()


def _merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(values)
    for key, value in changes.items():
        if isinstance(value, Mapping):
            below = merged.get(key)
            if not isinstance(below, Mapping):
                below = {}
            merged[key] = _merged(below, value)
        elif value == "none":
            merged[key] = None
        else:
            merged[key] = value
    return merged


def as_json(flavor: Any) -> str:
    return json.dumps(dataclasses.asdict(flavor), sort_keys=True)


def _answers(flavor: Any) -> dict[str, str]:
    library()
    from titanlite.models.transformers import probe

    return probe.probe(as_json(flavor))


def shape(flavor: Any) -> ModelDims:
    return library().dims(flavor)


def rules(flavor: Any) -> tuple[Rule, ...]:
    return library().rules(as_json(flavor))


def hf_config(flavor: Any) -> dict[str, Any]:
    return library().config_json(flavor)


def conversions(flavor: Any) -> Mapping[str, Conversion]:
    library()
    from titanlite.models.transformers import convert

    return convert.conversions(as_json(flavor))


SPEC = register_model(
    TransformersSpec(
        "transformers",
        FLAVORS,
        shape,
        rules,
        build="titanlite.models.transformers.model:build",
        unsplit="transformers' classes train with data parallel only; registered models have it",
        hf=HuggingFace(hf_config, conversions=conversions),
    )
)
