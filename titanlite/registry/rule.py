"""One table with a Rule per parameter pattern: what a model's parameters are, besides its code.

Every parameter matches exactly one row, so nothing is silently replicated, left uninitialized or
dropped on export.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from titanlite.errors import UserError
from titanlite.registry.hf import FusedSlice, WeightTransform

if TYPE_CHECKING:
    import torch

Role = Literal["embedding", "column", "row", "norm", "head", "replicated", "expert"]
"""The kind of a parameter; an expert weight is a stack of matrices (experts, rows, columns)."""


@dataclass(frozen=True)
class Init:
    """Initial values of a parameter: a constant, or a normal distribution around 0."""

    std: float = 0.0
    constant: float = 0.0
    by_depth: bool = False
    """Divide std by sqrt(2 x (layer + 1)), the layer being the number in the parameter's name."""
    by_inputs: bool = False
    """Divide std by the square root of the last dimension."""
    edit: Callable[[torch.Tensor, tuple[int, ...], int], None] | None = None
    """Changes the values of a rank's shard afterwards, given its offset and the seed."""


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
    """Name in a Hugging Face folder, with the pattern's wildcards in the same order.

    A `#` stands for the index along dimension 0, if each slice is a separate tensor there.
    """
    via: tuple[WeightTransform, ...] = ()
    """Transforms to its Hugging Face form, in order."""
    part: FusedSlice = FusedSlice()
    """Which slice of a Hugging Face tensor it is, if several parameters are joined there."""
    tied: str = ""
    """Second name of the same tensor, such as an output layer that shares the embedding."""
    active: float = 1.0
    """Fraction of the weight used per token: top_k / experts for expert weights, else 1."""

    def match(self, name: str) -> tuple[str, ...] | None:
        """Return the components of `name` at the wildcards, or None."""
        match = re.fullmatch(re.escape(self.pattern).replace(r"\*", r"([^.]+)"), name)
        if match:
            return match.groups()
        return None

    def hf_name(self, name: str) -> str:
        """Return the Hugging Face name of a parameter that this row matches."""
        wildcards = iter(self.match(name) or ())
        return re.sub(r"\*", lambda _: next(wildcards), self.hf)


def assign(
    rules: Sequence[Rule], names: Iterable[str], *, ties: Mapping[str, str]
) -> dict[str, Rule]:
    """Return the row of every parameter; an error names all parameters and rows that do not match
    one to one.

    `ties` maps the second name of every shared tensor to its first.
    """
    table: dict[str, Rule] = {}
    legal = get_args(Role)
    faults = []
    for rule in rules:
        if rule.tensor not in legal:
            role = f'the unknown role "{rule.tensor}"; legal: {", ".join(legal)}'
            faults.append(f"the row {rule.pattern} has {role}")
    for name in names:
        matching = [rule for rule in rules if rule.match(name) is not None]
        if len(matching) == 1:
            table[name] = matching[0]
        elif matching:
            faults.append(
                f"{name} matches several rows: {', '.join(rule.pattern for rule in matching)}"
            )
        else:
            faults.append(f"{name} matches no row")
    used = {rule.pattern for rule in table.values()}
    for rule in rules:
        if rule.pattern not in used:
            faults.append(f"the row {rule.pattern} matches no parameter")
    declared = {rule.tied: name for name, rule in table.items() if rule.tied}
    for second in sorted(declared.keys() | ties.keys()):
        if declared.get(second) != ties.get(second):
            faults.append(
                f"{second} shares its tensor with {ties.get(second, 'nothing')} in the model, "
                f"but with {declared.get(second, 'nothing')} in the table"
            )
    if faults:
        raise UserError(
            "the model's table does not cover its parameters:\n  " + "\n  ".join(faults)
        )
    return table


def expert_paths(rules: Iterable[Rule], blocks: str) -> tuple[str, ...]:
    """Return the paths, inside a block, of the modules with expert weights."""
    paths: dict[str, None] = {}
    for rule in rules:
        if rule.tensor == "expert":
            paths[rule.pattern.removeprefix(f"{blocks}.*.").rpartition(".")[0]] = None
    return tuple(paths)
