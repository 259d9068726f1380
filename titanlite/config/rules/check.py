"""How the rules of a config are applied: a rule gets what it needs as arguments, and is skipped if
one of them could not be derived.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, TypeVar, cast

from titanlite.config.load import ConfigFault, Loaded
from titanlite.config.schema import JobConfig
from titanlite.config.section import Section, value_of

Refusals = Iterator[tuple[str, str]]
"""Keys, each with its fault."""
Refuse = Callable[[str, str], None]
T = TypeVar("T")


class InvalidField(Exception):
    """A field without a valid value was read; its fault is already recorded."""


class _View:
    """A section that raises InvalidField if an invalid field is read."""

    def __init__(self, section: Section, prefix: str, invalid: set[str]) -> None:
        self._section = section
        self._prefix = prefix
        self._invalid = invalid

    def __getattr__(self, name: str) -> Any:
        key = self._prefix + name
        if key in self._invalid:
            raise InvalidField(key)
        value = getattr(self._section, name)
        if isinstance(value, Section):
            return _View(value, key + ".", self._invalid)
        return value


class Check:
    """The faults of a config found so far."""

    def __init__(self, loaded: Loaded) -> None:
        self.faults = list(loaded.faults)
        self.config = cast(JobConfig, _View(loaded.config, "", loaded.invalid))
        """The config for rules; reading an invalid field ends the rule."""
        self._loaded = loaded

    def find(self, derive: Callable[..., T | None], *inputs: Any, **others: Any) -> T | None:
        """Return what a function derives from its inputs, or None if it refuses a key or an input
        is missing. Keyword arguments may be None.
        """
        if any(value is None for value in inputs):
            return None
        with suppress(InvalidField):
            return derive(self.refuse, *inputs, **others)
        return None

    def apply(self, rule: Callable[..., Refusals], *inputs: Any) -> None:
        """Record what a rule refuses, unless an input is missing."""
        if any(value is None for value in inputs):
            return
        with suppress(InvalidField):
            for key, why in rule(*inputs):
                self.refuse(key, why)

    def refuse(self, key: str, why: str) -> None:
        """Record the fault of a key, with its value and the value's origin."""
        value = value_of(self._loaded.config, key)
        if isinstance(value, (Section, dict)):
            value = None
        origin = "default"
        for name, entry in self._loaded.entries.items():
            if f"{name}.".startswith(f"{key}."):
                origin = entry.origin
        self.faults.append(ConfigFault(key, why, value, origin))
