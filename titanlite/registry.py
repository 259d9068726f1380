"""What a model tells the framework: a ModelSpec, and one table with a Rule per parameter pattern. And optimizers.

A model is plain single-device code. Everything else that is known of its parameters (initial value, role under
tensor parallel, name in a Hugging Face folder) stands in its table, and every parameter matches exactly one row:
nothing is silently replicated, left uninitialised or dropped on export. No torch is imported here, nor by a
model's `__init__`, so that the config can be judged in milliseconds.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import pkgutil
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from titanlite.errors import UserError, nearest

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


Box = tuple[slice, ...]
"""A part of a tensor: a start and a stop for each dimension."""


class Step:
    """An invertible step between a tensor here and its form in a Hugging Face folder."""

    def to_hf(self, weight: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def from_hf(self, weight: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def around(self, box: Box, shape: Sequence[int]) -> tuple[Box, Box, Step]:
        """A box over there, the box here that is made of it alone and has all of `box`, and the step that does so.

        Whoever wants one row of a tensor reads all of it where a step does not say better.
        """
        whole = tuple(slice(0, size) for size in shape)
        import torch

        there = self.to_hf(torch.empty(tuple(shape), device="meta")).shape
        return tuple(slice(0, size) for size in there), whole, self


@dataclass(frozen=True)
class Rotary(Step):
    """Rows of a projection whose heads rotate adjacent pairs here, and halves over there."""

    heads: int

    def to_hf(self, weight: torch.Tensor) -> torch.Tensor:
        rows = weight.unflatten(0, (self.heads, -1, 2))
        return rows.transpose(1, 2).reshape(weight.shape)

    def from_hf(self, weight: torch.Tensor) -> torch.Tensor:
        rows = weight.unflatten(0, (self.heads, 2, -1))
        return rows.transpose(1, 2).reshape(weight.shape)

    def around(self, box: Box, shape: Sequence[int]) -> tuple[Box, Box, Step]:
        rows = shape[0] // self.heads
        first, last = box[0].start // rows, -(-box[0].stop // rows)
        heads = (slice(first * rows, last * rows), *box[1:])
        return heads, heads, Rotary(last - first)


@dataclass(frozen=True)
class Transposed(Step):
    """A matrix whose rows and columns are swapped over there."""

    def to_hf(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.t()

    def from_hf(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.t()

    def around(self, box: Box, shape: Sequence[int]) -> tuple[Box, Box, Step]:
        return box[::-1], box, self


@dataclass(frozen=True)
class Part:
    """One of several equal parts that are joined along a dimension over there, after the steps of `via`."""

    index: int
    of: int
    dim: int = 0


@dataclass(frozen=True)
class Rule:
    """One row of a model's table. A `*` in the pattern stands for one dotted component."""

    pattern: str
    init: Init
    tensor: Role
    hf: str = ""
    """Name in a Hugging Face folder, with the pattern's wildcards in the same order."""
    via: tuple[Step, ...] = ()
    """Steps to its form there, the first one first."""
    part: Part | None = None
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
class Shape:
    """What degrees are checked against and FLOPs are counted from."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_seq_len: int


@dataclass(frozen=True)
class HuggingFace:
    """A model's folder over there, but for the tensors, which the table names."""

    config: Callable[[Any], dict[str, Any]]
    """What config.json says of a flavour."""
    free: tuple[str, ...] = ()
    """Of that, what the weights do not depend on: a folder that is read may say otherwise."""
    ignored: tuple[str, ...] = ()
    """Patterns of tensors over there that hold nothing learned."""


@dataclass(frozen=True)
class ModelSpec:
    """A registered model. Flavours are frozen dataclasses; `build` names the module's class, imported late."""

    name: str
    flavors: Mapping[str, Any]
    shape: Callable[[Any], Shape]
    rules: Callable[[Any], tuple[Rule, ...]]
    build: str
    """"package.module:Class"; called with (flavour, positions), positions being the longest sequence."""
    blocks: str = "layers"
    """The ModuleDict of repeated blocks, keyed by the global layer number."""
    before: tuple[str, ...] = ("tok_embeddings",)
    """Modules that run before the blocks."""
    after: tuple[str, ...] = ("norm", "output")
    """Modules that run after the blocks."""
    hf: HuggingFace | None = None
    """Its form over there; None where nobody else knows the model."""

    def configure(self, flavor: str, overrides: Mapping[str, Any]) -> Any:
        """The flavour's values with some of them replaced; an error names all that do not fit."""
        from pydantic import TypeAdapter, ValidationError

        if flavor not in self.flavors:
            raise UserError(f'there is no flavour "{flavor}" of {self.name}; there are: {", ".join(self.flavors)}')
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
        return imported(self.build)(model_config, positions)


def imported(place: str) -> Any:
    """What "package.module:name" names."""
    path, _, attribute = place.partition(":")
    return getattr(importlib.import_module(path), attribute)


_specs: dict[str, ModelSpec] = {}


def register_model(spec: ModelSpec) -> ModelSpec:
    """Make a model known by its name. Registering the same name again replaces it (a re-imported module)."""
    _specs[spec.name] = spec
    return spec


def get_model(name: str, package: str = "") -> ModelSpec:
    """The spec of a model, importing only what must be: `package`, the folder in models/, or an entry point."""
    _import_package(package)
    if name not in _specs and name in _folders():
        importlib.import_module(f"titanlite.models.{name}")
    return _find("model", name, _specs, others=_folders())


@dataclass(frozen=True)
class OptimizerSpec:
    """A registered optimizer."""

    name: str
    build: str
    """"package.module:function", imported late; called with (trained parameters, config), see optim.py."""
    states: int
    """Tensors of a parameter's size that it keeps for each."""
    matrix_states: int | None = None
    """The same for matrices inside of blocks, where these are treated otherwise."""
    unused: tuple[str, ...] = ()
    """Keys of [optimizer] that mean nothing to it."""


_optimizers: dict[str, OptimizerSpec] = {}


def register_optimizer(spec: OptimizerSpec) -> OptimizerSpec:
    """Make an optimizer known by its name, as `register_model` does a model."""
    _optimizers[spec.name] = spec
    return spec


def get_optimizer(name: str, package: str = "") -> OptimizerSpec:
    """The spec of an optimizer: one of ours, of `package`, or of an entry point."""
    _import_package(package)
    return _find("optimizer", name, _optimizers)


_NO_MOMENTS = ("beta1", "beta2", "eps", "state_dtype")
for _spec in (
    OptimizerSpec("AdamW", "titanlite.optim:adam", states=2),
    OptimizerSpec("Adam", "titanlite.optim:adam", states=2),
    OptimizerSpec("SGD", "titanlite.optim:sgd", states=0, unused=_NO_MOMENTS),
    OptimizerSpec("Muon", "titanlite.muon:muon", states=2, matrix_states=1),
):
    register_optimizer(_spec)


def _import_package(package: str) -> None:
    """Import what registers, or say that it is not there."""
    if not package:
        return
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{package}.".startswith(f"{error.name}."):
            raise
        raise UserError(f"there is no package {package} (from {error.name}); is it installed?") from None


_Spec = TypeVar("_Spec")


def _find(kind: str, name: str, registered: Mapping[str, _Spec], others: Iterable[str] = ()) -> _Spec:
    """What is registered under a name, by an entry point if need be."""
    if name in registered:
        return registered[name]
    outside = {point.name: point for point in entry_points(group=f"titanlite.{kind}s")}
    if name in outside:
        outside[name].load()
        if name in registered:
            return registered[name]
    known = sorted({*others, *outside, *registered})
    close = nearest(name, known)
    hint = f"; did you mean {close}?" if close else ";"
    raise UserError(f'no {kind} is registered as "{name}"{hint} Known: {", ".join(known)}')


_converters: dict[str, str] = {"float8": "titanlite.float8:Float8"}


def register_converter(name: str, build: str) -> None:
    """Make a converter known to model.converters. `build` is "package.module:Class", imported late and called with
    the Job; what a converter does says titanlite/converters.py."""
    _converters[name] = build


def find_converter(name: str) -> str:
    """Where a converter is built: one that model.package registered, or an entry point did."""
    return _find("converter", name, _converters)


def _folders() -> list[str]:
    """Names of the models in models/, without importing any."""
    package = importlib.util.find_spec("titanlite.models")
    places = package.submodule_search_locations if package else None
    return [m.name for m in pkgutil.iter_modules(places) if m.ispkg and m.name != "common"]
