"""TorchTitan's keys, read from torchtitan.toml.

A key that titanlite lacks is accepted with a value that switches nothing on, and otherwise refused
by name."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlite.config.toml import tomllib

FLOAT8_CONVERTERS = ("float8", "quantize.linear.float8")
"""Entries of model.converters that switch [quantize.linear.float8] on."""


@dataclass(frozen=True)
class Foreign:
    """Values that switch nothing on (None: every value), and what to use instead of others."""

    off: tuple[Any, ...] | None
    instead: str


_DATA = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))

RENAMED: dict[str, str] = _DATA["renamed"]
"""Old spellings that still work."""

OTHER_NAMES: dict[str, str] = _DATA["other_names"]
"""Names of keys in other programs; they lead to a suggestion, but are not accepted."""

NOT_DONE: dict[str, str] = _DATA["not_done"]
"""Values of other frameworks, and why they are refused."""

STATES: dict[str, str] = _DATA["states"]
"""TorchTitan's names for states in checkpoint.exclude_from_loading, and what to write instead."""

NEW: list[str] = _DATA["new"]
"""Keys that TorchTitan does not have."""

DIFFERENT: dict[str, str] = _DATA["different"]
"""Keys with another default or meaning than TorchTitan's, and the difference."""

FOREIGN: dict[str, Foreign] = {
    **{key: Foreign(None, "") for key in _DATA["tuning"]},
    **{key: Foreign((), f"is spelled {name} here") for key, name in _DATA["spelled"].items()},
    **{
        key: Foreign(tuple(known["values"]), known["instead"])
        for key, known in _DATA["off"].items()
    },
}
"""Keys and sections that titanlite does not have."""


def foreign(key: str) -> Foreign | None:
    """Return the entry of a TorchTitan key, or None."""
    if key in FOREIGN:
        return FOREIGN[key]
    if key.startswith("float8."):
        return FOREIGN["float8"]
    tunes = any(key.startswith(f"{section}.") for section in _DATA["tuning_sections"])
    return Foreign(None, "") if tunes else None
