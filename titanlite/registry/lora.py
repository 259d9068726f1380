"""LoRA as rows of a model's table: the product of two narrow matrices is trained next to a matrix,
and everything else is frozen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from titanlite.registry.rule import Init, Rule, zeros


def is_adapter(name: str) -> bool:
    return name.endswith(("lora_A", "lora_B"))


def adapter_of(matrix: str) -> tuple[str, str]:
    """Return the names of A and B for a matrix's name, or their patterns for its pattern."""
    path = matrix.removesuffix(".weight")
    return f"{path}.lora_A", f"{path}.lora_B"


@dataclass(frozen=True)
class Adapters:
    """The settings of [lora]."""

    rank: int
    alpha: float
    dropout: float
    patterns: tuple[str, ...]

    @classmethod
    def of(cls, lora: Any) -> Adapters | None:
        """Return the adapters of a config's [lora] section; None if its rank is 0."""
        if not lora.rank:
            return None
        return cls(lora.rank, lora.alpha, lora.dropout, tuple(lora.patterns))

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def bases(self, rules: Sequence[Rule]) -> dict[str, Rule]:
        """Return the rows of the matrices with adapters, by the pattern of the module."""
        found = {}
        for rule in rules:
            path = rule.pattern.removesuffix(".weight")
            is_matrix = path != rule.pattern and rule.tensor in ("column", "row")
            if is_matrix and any(fnmatchcase(path, pattern) for pattern in self.patterns):
                found[path] = rule
        return found

    def rows(self, rules: Sequence[Rule]) -> tuple[Rule, ...]:
        """Return the rows of A and B: A is split like the matrix's inputs, B like its outputs."""
        rows = []
        for rule in self.bases(rules).values():
            a, b = adapter_of(rule.pattern)
            # The variance of kaiming_uniform(a=sqrt(5)), from a normal distribution.
            init = Init(std=3**-0.5, by_inputs=True)
            if rule.tensor == "row":
                rows += [Rule(a, init, "row"), Rule(b, zeros, "replicated")]
            else:
                rows += [Rule(a, init, "replicated"), Rule(b, zeros, "column")]
        return tuple(rows)
