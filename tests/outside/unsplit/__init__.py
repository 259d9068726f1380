"""Llama, GPT-2 and Qwen 3 with rows of their tables that nothing splits: those that match a pattern
in `whole`.
"""

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from titanlite.models.gpt2 import SPEC as GPT
from titanlite.models.gpt2 import GPT2Config
from titanlite.models.llama3 import SPEC as LLAMA
from titanlite.models.llama3 import LlamaConfig
from titanlite.models.qwen3 import SPEC as QWEN
from titanlite.models.qwen3 import QwenConfig
from titanlite.registry import ModelSpec, Rule, register_model


@dataclass(frozen=True)
class UnsplitLlama(LlamaConfig):
    whole: tuple[str, ...] = ("*",)


@dataclass(frozen=True)
class UnsplitGPT(GPT2Config):
    whole: tuple[str, ...] = ("*",)


@dataclass(frozen=True)
class UnsplitQwen(QwenConfig):
    whole: tuple[str, ...] = ("*",)


def _register(name: str, spec: ModelSpec, cls: type, flavor: str) -> None:
    def rules(c: Any) -> tuple[Rule, ...]:
        return tuple(
            replace(rule, tensor="replicated")
            if any(fnmatchcase(rule.pattern, p) for p in c.whole)
            else rule
            for rule in spec.rules(c)
        )

    flavors = {"small": cls(**vars(spec.flavors[flavor]))}
    register_model(replace(spec, name=name, flavors=flavors, rules=rules, hf=None))


_register("unsplit", LLAMA, UnsplitLlama, "debugmodel")
_register("unsplit_gpt2", GPT, UnsplitGPT, "debugmodel")
_register("unsplit_moe", QWEN, UnsplitQwen, "debugmodel_moe")
