"""What a rule reads: the config without its invalid fields, and the values that earlier rules derived from it."""

from collections.abc import Callable, Iterator
from typing import Any

from titanlite.config.load import ConfigFault, Loaded
from titanlite.config.schema import value_of
from titanlite.config.section import Section
from titanlite.config.stages import Stages
from titanlite.layout import Layout
from titanlite.registry import ModelDims, ModelSpec

Faults = Iterator[tuple[str, str]]
"""Keys, and the fault of each."""


class InvalidField(Exception):
    """A rule reads a field without a valid value, so it cannot be applied."""


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


class RuleContext:
    """The config, and what earlier rules derived from it: reading it earlier raises InvalidField."""

    layout: Layout
    spec: ModelSpec
    model: Any
    shape: ModelDims
    order: tuple[tuple[str, ...], ...]
    """The order of a CSV, if there is one."""
    number_of_stages: int
    stage_names: tuple[tuple[str, ...], ...]
    stages: Stages

    def __init__(self, loaded: Loaded, world: int | None) -> None:
        self.loaded, self.world = loaded, world
        self.config: Any = ConfigView(loaded.config, "", loaded.invalid)

    def __getattr__(self, name: str) -> Any:
        raise InvalidField(name)

    def fault(self, key: str, why: str) -> ConfigFault:
        """Return the fault of a key, with its value and where the value comes from."""
        value = value_of(self.loaded.config, key)
        entries = [entry for name, entry in self.loaded.entries.items() if f"{name}.".startswith(f"{key}.")]
        origin = entries[-1].origin if entries else "default"
        return ConfigFault(key, why, None if isinstance(value, (Section, dict)) else value, origin)


Rule = Callable[[RuleContext], Faults]


class Rules(list[Rule]):
    """The rules of one subject, in their order."""

    def add(self, rule: Rule) -> Rule:
        """Append a rule; used as a decorator."""
        self.append(rule)
        return rule
