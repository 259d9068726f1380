"""Models, optimizers, converters and sinks by name: built in, registered by `model.package`, or
from an entry point.
"""

import importlib
import importlib.util
import os
import pkgutil
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar

from titanlite.errors import UserError, first_line, nearest
from titanlite.registry.model import ModelSpec

Item = TypeVar("Item")


class Registry(Generic[Item]):
    """Items of one kind by name. Registering a name again replaces its item."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self.items: dict[str, Item] = {}

    def find(self, name: str, package: str = "") -> Item:
        """Return an item, importing `package`, a folder in models/, or an entry point for it."""
        import_package(package)
        if name not in self.items:
            load = self._loaders().get(name)
            if load:
                load()
        if name in self.items:
            return self.items[name]
        known = self.names()
        close = nearest(name, known)
        has_digits = re.search(r"\d", name)
        if has_digits and re.sub(r"\d", "", close) == re.sub(r"\d", "", name):
            close = ""  # llama4 is not llama3 misspelled
        hint = f"did you mean {close}? Known:" if close else "known:"
        more = ""
        if self._kind == "model" and not close:
            options = f"--model.name transformers --model.overrides.model_type {name}"
            more = f"; a class of transformers, if it has one: {options}"
        listed = ", ".join(known)
        raise UserError(f'no {self._kind} is registered as "{name}"; {hint} {listed}{more}')

    def names(self) -> list[str]:
        """Return all names, without importing anything."""
        return sorted({*self.items, *self._loaders()})

    def _loaders(self) -> dict[str, Callable[[], object]]:
        """Return what imports the items that may not be registered yet: folders in models/, and
        entry points.
        """
        loaders: dict[str, Callable[[], object]] = {}
        for point in entry_points(group=f"titanlite.{self._kind}s"):
            loaders[point.name] = partial(_load_entry_point, point)
        if self._kind == "model":
            for name in _model_folders():
                loaders[name] = partial(importlib.import_module, f"titanlite.models.{name}")
        return loaders


_models = Registry[ModelSpec]("model")
get_model = _models.find
model_names = _models.names


def register_model(spec: ModelSpec) -> ModelSpec:
    """Register a model under its name."""
    _models.items[spec.name] = spec
    return spec


@dataclass(frozen=True)
class OptimizerSpec:
    """A registered optimizer."""

    name: str
    build: str
    """"package.module:function", imported late.

    It is called with (trained parameters, config), see optim/build.py.
    """
    states: int
    """State tensors of a parameter's size that it keeps for each parameter."""
    matrix_states: int | None = None
    """The same for matrices inside blocks, if different."""
    unused: tuple[str, ...] = ()
    """Keys of [optimizer] that have no effect on it."""
    communicates: bool = False
    """Whether the function also gets the Mesh; None if there is only one process."""
    elementwise: bool = False
    """Whether it updates each element in place from its own gradient and state, and keeps its
    numbers in tensors, so that optimizer.state_on can cut parameters into pieces.
    """


_optimizers = Registry[OptimizerSpec]("optimizer")
get_optimizer = _optimizers.find


def register_optimizer(spec: OptimizerSpec) -> OptimizerSpec:
    """Register an optimizer under its name."""
    _optimizers.items[spec.name] = spec
    return spec


for _name in ("AdamW", "Adam"):
    register_optimizer(
        OptimizerSpec(_name, "titanlite.optim.build:adam", states=2, elementwise=True)
    )
_no_moments = ("beta1", "beta2", "eps", "state_dtype", "state_on")
register_optimizer(OptimizerSpec("SGD", "titanlite.optim.build:sgd", states=0, unused=_no_moments))
register_optimizer(
    OptimizerSpec("Muon", "titanlite.optim.muon:muon", states=2, matrix_states=1, communicates=True)
)

_converters = Registry[str]("converter")
find_converter = _converters.find


def register_converter(name: str, build: str) -> None:
    """Register a converter for model.converters.

    `build` is "package.module:Class", imported late and called with the Job; see
    titanlite/parallel/build.py.
    """
    _converters.items[name] = build


register_converter("float8", "titanlite.parallel.float8:Float8")


@dataclass(frozen=True)
class SinkSpec:
    """A sink of metrics.sinks."""

    name: str
    build: str
    """"package.module:function", imported late.

    It is called with (config, the run's id) and returns three functions, see observe/trackers.py.
    """
    package: str = "titanlite"
    """The package that it needs, and that a user installs."""
    offline: str = ""
    """How to use it without a network."""


_sinks = Registry[SinkSpec]("sink")
get_sink = _sinks.find


def register_sink(spec: SinkSpec) -> SinkSpec:
    """Register a sink under its name."""
    _sinks.items[spec.name] = spec
    return spec


_built_in = "titanlite.observe.trackers"
register_sink(SinkSpec("wandb", f"{_built_in}:wandb", "wandb", "WANDB_MODE=offline"))
register_sink(SinkSpec("mlflow", f"{_built_in}:mlflow", "mlflow"))


def import_package(package: str) -> None:
    """Import a package that registers items, installed or in the current folder.

    Raise UserError if it is neither.
    """
    if not package:
        return
    if not all(part.isidentifier() for part in package.split(".")):
        raise UserError(f'"{package}" is not a name that Python can import, such as my_models.tiny')
    if "" not in sys.path:
        # The current folder, where an installed script does not look; last, to shadow nothing.
        sys.path.append("")
    try:
        module = importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{package}.".startswith(f"{error.name}."):
            raise
        raise UserError(
            f"there is no package {error.name} in {os.getcwd()}, and none is installed"
        ) from None
    if not getattr(module, "__file__", None):
        raise UserError(
            f"{next(iter(module.__path__))} is not a package: it has no __init__.py; start in "
            "the folder that contains the package, or add that folder to PYTHONPATH"
        )


def _load_entry_point(point: EntryPoint) -> None:
    """Import another package's entry point; any error becomes one line that names it."""
    try:
        point.load()
    except Exception as error:
        of = "the entry point"
        if point.dist:
            of = f"{point.dist.name}'s entry point"
        why = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(
            f'{of} {point.name} = "{point.value}" in {point.group} fails to import: {why}'
        ) from None


def _model_folders() -> list[str]:
    """Return the names of the models in models/, without importing any."""
    package = importlib.util.find_spec("titanlite.models")
    paths = package.submodule_search_locations if package else None
    found = list[str]()
    for module in pkgutil.iter_modules(paths):
        if module.ispkg and module.name != "common":
            found.append(module.name)
    return found
