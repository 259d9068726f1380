"""TOML: the reader of every supported Python, and a writer of configs."""

import json
import sys
from typing import Any

from titanlite.config.schema import KEYS, JobConfig, Section, value_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["to_toml", "toml_differences", "toml_value", "tomllib"]


def to_toml(config: JobConfig) -> str:
    """Write the whole config as TOML that load() reads back to the same config."""
    blocks: dict[str, list[str]] = {}
    for key in KEYS:
        section, _, name = key.rpartition(".")
        blocks.setdefault(section, [f"[{section}]"]).append(f"{name} = {toml_value(value_of(config, key))}")
    return "\n\n".join("\n".join(block) for block in blocks.values()) + "\n"


def toml_value(value: Any) -> str:
    """Write a value as TOML; null, which TOML lacks, is "none", which load() reads."""
    if value is None or isinstance(value, (bool, str)):
        text = json.dumps("none" if value is None else value, ensure_ascii=False)
        return text.replace("\x7f", "\\u007f")  # the one control character that JSON allows and TOML does not
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, Section):
        return toml_value(value.model_dump())
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{k} = {toml_value(v)}" for k, v in value.items()) + " }" if value else "{}"
    return str(value)


def toml_differences(old: str, new: str) -> dict[str, str]:
    """Return both values of each dotted key that differs between two TOML texts, for people."""

    def show(values: dict[str, Any], key: str) -> str:
        return json.dumps(values[key]) if key in values else "not set"

    before, after = _flatten(tomllib.loads(old)), _flatten(tomllib.loads(new))
    return {
        key: f"{show(before, key)} -> {show(after, key)}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    }


def _flatten(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return values by dotted key."""
    flat: dict[str, Any] = {}
    for name, value in table.items():
        flat |= _flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat
