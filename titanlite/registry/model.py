"""What a model tells the framework: a ModelSpec, and one table with a Rule per parameter pattern.

A model is plain single-device code. Everything else that is known of its parameters (initial value, role under
tensor parallel, name in a Hugging Face folder) stands in its table, and every parameter matches exactly one row:
nothing is silently replicated, left uninitialized or dropped on export.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from titanlite.errors import UserError, nearest
from titanlite.registry.hf import FusedSlice, HuggingFace, WeightTransform

if TYPE_CHECKING:
    import torch

Role = Literal["embedding", "column", "row", "norm", "head", "whole"]


@dataclass(frozen=True)
class Init:
    """Initial values of a parameter: a constant, or a normal distribution around 0."""

    std: float = 0.0
    constant: float = 0.0
    by_depth: bool = False
    """Divide std by sqrt(2 x (layer + 1)), the layer being the number in the parameter's name."""


def normal(std: float, by_depth: bool = False) -> Init:
    return Init(std=std, by_depth=by_depth)


ones = Init(constant=1.0)
zeros = Init()


@dataclass(frozen=True)
class Rule:
    """One row of a model's table. A `*` in the pattern stands for one dotted component."""

    pattern: str
    init: Init
    tensor: Role
    hf: str = ""
    """Name in a Hugging Face folder, with the pattern's wildcards in the same order."""
    via: tuple[WeightTransform, ...] = ()
    """Steps to its form there, the first one first."""
    part: FusedSlice | None = None
    tied: str = ""
    """Second name of the same tensor, such as an output layer that shares the embedding's weight."""

    def match(self, name: str) -> tuple[str, ...] | None:
        """What the wildcards stand for in `name`, or None."""
        found = re.fullmatch(re.escape(self.pattern).replace(r"\*", r"([^.]+)"), name)
        return None if found is None else found.groups()

    def hf_name(self, name: str) -> str:
        """The Hugging Face name of a parameter that this row matches."""
        parts = iter(self.match(name) or ())
        return re.sub(r"\*", lambda _: next(parts), self.hf)


def assign(rules: Iterable[Rule], names: Iterable[str], *, ties: Mapping[str, str]) -> dict[str, Rule]:
    """The row of every parameter; an error names all parameters and rows that do not pair off exactly.

    `ties` maps the second name of every shared tensor to its first.
    """
    rules = list(rules)
    table: dict[str, Rule] = {}
    used: set[str] = set()
    faults: list[str] = []
    for name in names:
        matching = [rule for rule in rules if rule.match(name) is not None]
        if len(matching) == 1:
            table[name] = matching[0]
            used.add(matching[0].pattern)
        elif matching:
            faults.append(f"{name} matches several rows: {', '.join(rule.pattern for rule in matching)}")
        else:
            faults.append(f"{name} matches no row")
    faults += [f"the row {rule.pattern} matches no parameter" for rule in rules if rule.pattern not in used]
    declared = {rule.tied: name for name, rule in table.items() if rule.tied}
    for second in sorted(declared.keys() | ties.keys()):
        if declared.get(second) != ties.get(second):
            faults.append(
                f"{second} shares its tensor with {ties.get(second, 'nothing')} in the model, "
                f"but with {declared.get(second, 'nothing')} in the table"
            )
    if faults:
        raise UserError("the model's table does not cover its parameters:\n  " + "\n  ".join(faults))
    return table


@dataclass(frozen=True)
class ModelDims:
    """What degrees are checked against and FLOPs are counted from."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_seq_len: int


@dataclass(frozen=True)
class ModelSpec:
    """A registered model. Flavors are frozen dataclasses; `build` names the module's class, imported late."""

    name: str
    flavors: Mapping[str, Any]
    shape: Callable[[Any], ModelDims]
    rules: Callable[[Any], tuple[Rule, ...]]
    build: str
    """"package.module:Class"; called with (flavor, positions), positions being the longest sequence."""
    blocks: str = "layers"
    """The ModuleDict of repeated blocks, keyed by the global layer number."""
    before: tuple[str, ...] = ("tok_embeddings",)
    """Modules that run before the blocks."""
    after: tuple[str, ...] = ("norm", "output")
    """Modules that run after the blocks."""
    hf: HuggingFace | None = None
    """Its form over there; None where nobody else knows the model."""

    def configure(self, flavor: str, overrides: Mapping[str, Any]) -> Any:
        """The flavor's values with some of them replaced; an error names all that do not fit."""
        from pydantic import TypeAdapter, ValidationError

        if flavor not in self.flavors:
            raise UserError(f'there is no flavor "{flavor}" of {self.name}; there are: {", ".join(self.flavors)}')
        base = self.flavors[flavor]
        known = {f.name: getattr(base, f.name) for f in dataclasses.fields(base)}
        if unknown := sorted(overrides.keys() - known.keys()):
            hints = [f"{name} (nearest: {nearest(name, known) or 'none'})" for name in unknown]
            raise UserError(f"{self.name} has no field {', '.join(hints)}; it has: {', '.join(known)}")
        try:
            values = json.dumps({**dataclasses.asdict(base), **overrides})
            return TypeAdapter(type(base)).validate_json(values, strict=True)
        except ValidationError as error:
            faults = [f"{'.'.join(map(str, e['loc'])) or self.name}: {e['msg']}" for e in error.errors()]
            raise UserError("; ".join(faults)) from None

    def module(self, model_config: Any, positions: int) -> torch.nn.Module:
        """A new instance of the model, on whatever device is the default."""
        return import_object(self.build)(model_config, positions)


def import_object(place: str) -> Any:
    """What "package.module:name" names."""
    path, _, attribute = place.partition(":")
    return getattr(importlib.import_module(path), attribute)
