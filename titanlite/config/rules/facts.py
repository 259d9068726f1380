"""What a rule reads: the config without its invalid fields, and the facts that were derived from
it.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache
from inspect import Parameter, isgeneratorfunction, signature
from types import ModuleType
from typing import Any

from titanlite.config.load import ConfigFault, Loaded
from titanlite.config.schema import value_of
from titanlite.config.section import Section
from titanlite.config.stages import Stages
from titanlite.layout import Batch, Layout
from titanlite.registry import ModelDims, ModelSpec

Refusals = Iterator[tuple[str, str]]
"""Keys, each with its fault."""
Refuse = Callable[[str, str], None]


class InvalidField(Exception):
    """A field without a valid value is read; it has a fault already."""


class ConfigView:
    """A section that raises InvalidField when an invalid field is read."""

    def __init__(self, section: Section, prefix: str, invalid: set[str]) -> None:
        self._section, self._prefix, self._invalid = section, prefix, invalid

    def __getattr__(self, name: str) -> Any:
        key = self._prefix + name
        if key in self._invalid:
            raise InvalidField(key)
        value = getattr(self._section, name)
        return ConfigView(value, key + ".", self._invalid) if isinstance(value, Section) else value


@lru_cache(256)  # a search applies the rules to thousands of jobs
def _parameters(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    return [(each.name, each.default) for each in signature(function).parameters.values()]


class Facts:
    """The known facts of a config, and its faults. A fact that cannot be derived is absent."""

    spec: ModelSpec
    model: Any
    shape: ModelDims
    layout: Layout
    batch: Batch
    stages: Stages

    def __init__(self, loaded: Loaded, world: int | None) -> None:
        self.loaded = loaded
        self.world = world or 0
        self.config = ConfigView(loaded.config, "", loaded.invalid)
        self.faults = list(loaded.faults)

    def find(self, name: str, derive: Callable[..., Any]) -> None:
        """Set a fact to what a function returns, which refuses keys and returns None where it
        cannot derive it.
        """
        with suppress(InvalidField):
            found = self._call(derive)
            if found is not None:
                setattr(self, name, found)

    def apply(self, module: ModuleType) -> None:
        """Record what the rules of a module refuse; a rule without all its facts cannot be
        applied.
        """
        for function in vars(module).values():
            if isgeneratorfunction(function) and function.__module__ == module.__name__:
                with suppress(InvalidField):
                    for refusal in self._call(function) or ():
                        self.refuse(*refusal)

    def _call(self, function: Callable[..., Any]) -> Any:
        """Call a function with the facts that its parameters name; return None if one without a
        default is absent.
        """
        given = {name: getattr(self, name, default) for name, default in _parameters(function)}
        return None if Parameter.empty in given.values() else function(**given)

    def refuse(self, key: str, why: str) -> None:
        """Record the fault of a key, with its value and where the value comes from."""
        value = value_of(self.loaded.config, key)
        entries = [
            entry for name, entry in self.loaded.entries.items() if f"{name}.".startswith(f"{key}.")
        ]
        origin = entries[-1].origin if entries else "default"
        self.faults.append(
            ConfigFault(key, why, None if isinstance(value, (Section, dict)) else value, origin)
        )
