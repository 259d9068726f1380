"""The declarations of a model: a ModelSpec, and one table with a Rule per parameter pattern.

A model is plain single-device code; everything else is in its table. Every parameter matches
exactly one row, so nothing is silently replicated, left uninitialized or dropped on export.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal, get_args

from titanlite.errors import UserError
from titanlite.registry.flavor import configured
from titanlite.registry.hf import FusedSlice, HuggingFace, TorchTitan, WeightTransform

if TYPE_CHECKING:
    import torch

    from titanlite.registry.lora import Adapters

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

    def __post_init__(self) -> None:
        if self.tensor == "whole":  # the earlier name
            object.__setattr__(self, "tensor", "replicated")

    def match(self, name: str) -> tuple[str, ...] | None:
        """Return the components of `name` at the wildcards, or None."""
        match = re.fullmatch(re.escape(self.pattern).replace(r"\*", r"([^.]+)"), name)
        return match.groups() if match else None

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
    unknown = [rule for rule in rules if rule.tensor not in legal]
    faults = [
        f'the row {r.pattern} has the unknown role "{r.tensor}"; legal: {", ".join(legal)}'
        for r in unknown
    ]
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
    faults += [
        f"the row {rule.pattern} matches no parameter" for rule in rules if rule.pattern not in used
    ]
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


@dataclass(frozen=True)
class ModelDims:
    """A model's dimensions, used to check degrees and count FLOPs."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_seq_len: int
    experts: int = 0
    """Experts in each block except the first `dense_layers`."""
    dense_layers: int = 0


def expert_paths(rules: Iterable[Rule], blocks: str) -> tuple[str, ...]:
    """Return the paths, inside a block, of the modules with expert weights."""
    patterns = [
        rule.pattern.removeprefix(f"{blocks}.*.") for rule in rules if rule.tensor == "expert"
    ]
    return tuple(dict.fromkeys(pattern.rpartition(".")[0] for pattern in patterns))


@dataclass(frozen=True)
class ModelSpec:
    """A registered model."""

    name: str
    flavors: Mapping[str, Any]  # frozen dataclasses
    shape: Callable[[Any], ModelDims]
    rules: Callable[[Any], tuple[Rule, ...]]
    build: str
    """"package.module:Class", imported late.

    It is called with (flavor, positions in the longest sequence).
    """
    blocks: str = "layers"
    """The ModuleDict of repeated blocks, keyed by the global layer number."""
    before: tuple[str, ...] = ("tok_embeddings",)
    """Modules that run before the blocks."""
    after: tuple[str, ...] = ("norm", "output")
    """Modules that run after the blocks."""
    core: str = ""
    """Path of the attention core inside a block (context parallel replaces it).

    Empty if unsupported.
    """
    unsplit: str = ""
    """Why only data parallel is possible; empty if the model can be split."""
    hf: HuggingFace | None = None
    """Its Hugging Face form; None if transformers does not have the model."""
    torchtitan: Callable[[Any], TorchTitan] = lambda flavor: TorchTitan()
    parameters: Callable[[Any], int] | None = None
    """Returns a flavor's number of parameters, for `titanlite models`, which does not build it."""
    active_parameters: Callable[[Any], int] | None = None
    """Returns how many of them a token uses, for a model with experts."""
    idle: Callable[[Any], Mapping[str, str]] = lambda flavor: {}
    """Returns fields that have no effect in a flavor, with the reason; a run that sets one logs it.
    """
    adapters: Adapters | None = None
    """The settings of [lora]; a job sets it."""
    unchecked_fields: tuple[str, ...] = ("dropout", "max_seq_len")
    """Fields that may differ from those that loaded weights were trained with."""

    def configure(self, flavor: str, overrides: Mapping[str, Any]) -> Any:
        """Return the flavor's config with some fields replaced; an error names all faults."""
        reads_folders = bool(self.hf and self.hf.fields)
        return configured(self.name, self.flavors, flavor, overrides, reads_folders)

    def of(self, model_config: Any) -> ModelSpec:
        """Return the model's spec for a flavor, since module names may depend on it."""
        return self

    def limits(self, model_config: Any) -> Mapping[str, str]:
        """Return config keys that may not be set with this model, each with the reason."""
        return {}

    def remark(self, model_config: Any) -> str:
        """Return a line about the model for the start of a run."""
        return ""

    def on_cpu(self) -> AbstractContextManager[None]:
        """Return a context in which the model calls nothing that needs GPU tensors."""
        return nullcontext()

    def module(self, model_config: Any, positions: int) -> torch.nn.Module:
        """Return a new instance of the model, on torch's default device."""
        return resolve_name(self.build)(model_config, positions)
