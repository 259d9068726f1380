"""What is registered by name: models, optimizers, converters; built-in, from `model.package`, or an entry point."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TypeVar

from titanlite.errors import UserError, nearest
from titanlite.registry.model import ModelSpec

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
    OptimizerSpec("AdamW", "titanlite.optim.build:adam", states=2),
    OptimizerSpec("Adam", "titanlite.optim.build:adam", states=2),
    OptimizerSpec("SGD", "titanlite.optim.build:sgd", states=0, unused=_NO_MOMENTS),
    OptimizerSpec("Muon", "titanlite.optim.muon:muon", states=2, matrix_states=1),
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


_converters: dict[str, str] = {"float8": "titanlite.parallel.float8:Float8"}


def register_converter(name: str, build: str) -> None:
    """Make a converter known to model.converters. `build` is "package.module:Class", imported late and called with
    the Job; what a converter does says titanlite/parallel/convert.py."""
    _converters[name] = build


def find_converter(name: str) -> str:
    """Where a converter is built: one that model.package registered, or an entry point did."""
    return _find("converter", name, _converters)


def _folders() -> list[str]:
    """Names of the models in models/, without importing any."""
    package = importlib.util.find_spec("titanlite.models")
    places = package.submodule_search_locations if package else None
    return [m.name for m in pkgutil.iter_modules(places) if m.ispkg and m.name != "common"]
