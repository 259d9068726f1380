"""What rules between fields read: the config without its invalid fields, and what earlier rules derived from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from titanlite.config.load import Fault, Loaded
from titanlite.config.schema import Section
from titanlite.layout import Layout
from titanlite.registry import ModelDims, ModelSpec

Faults = Iterator[tuple[str, str]]
"""Keys, and what is wrong with each."""


class InvalidField(Exception):
    """A rule asked for a field that has no valid value."""


class _ConfigView:
    """A section whose invalid fields can't be read."""

    def __init__(self, section: Section, prefix: str, invalid: set[str]) -> None:
        self._section, self._prefix, self._invalid = section, prefix, invalid

    def __getattr__(self, name: str) -> Any:
        key = self._prefix + name
        if key in self._invalid:
            raise InvalidField(key)
        value = getattr(self._section, name)
        return _ConfigView(value, key + ".", self._invalid) if isinstance(value, Section) else value


@dataclass
class RuleContext:
    """What rules read: the config, and what earlier rules derived from it (None until they could)."""

    loaded: Loaded
    world: int | None
    found_layout: Layout | None = None
    found_spec: ModelSpec | None = None
    found_model: Any = None
    config: Any = field(init=False)

    def __post_init__(self) -> None:
        self.config = _ConfigView(self.loaded.config, "", self.loaded.invalid)

    @property
    def layout(self) -> Layout:
        return _readable(self.found_layout)

    @property
    def spec(self) -> ModelSpec:
        return _readable(self.found_spec)

    @property
    def model(self) -> Any:
        return _readable(self.found_model)

    @property
    def shape(self) -> ModelDims:
        return self.spec.shape(self.model)

    def fault(self, key: str, why: str) -> Fault:
        """A fault at a key, with the value in force and where it came from."""
        value: Any = self.loaded.config
        for part in key.split("."):
            value = getattr(value, part)
        entries = [e for k, e in self.loaded.entries.items() if k == key or k.startswith(f"{key}.")]
        origin = entries[-1].origin if entries else "default"
        return Fault(key, why, None if isinstance(value, (Section, dict)) else value, origin)


def _readable(value: Any) -> Any:
    if value is None:
        raise InvalidField
    return value
