"""TOML: a reader for every supported Python, and a writer of configs."""

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titanlite.config.schema import KEYS, JobConfig
from titanlite.config.section import Section, value_of
from titanlite.errors import UserError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read_toml(file: Path) -> dict[str, Any]:
    """Read a TOML file; a UserError describes the mistake, without the file's name."""
    text = ""
    try:
        other = _other_format(file)
        if other:
            raise UserError(
                f"is {other}; titanlite reads TOML in UTF-8, such as the files in train_configs/"
            )
        text = file.read_text(encoding="utf-8-sig")
        return tomllib.loads(text)
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        what = f"line {line} is not UTF-8 (byte 0x{error.object[error.start]:02x})"
        raise UserError(f"{what}; save the file as UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        why = _given_twice(f"{error}", text) or f"cannot be read as TOML: {error}"
        raise UserError(why) from None


def _other_format(file: Path) -> str:
    """Return the format that a file seems to have instead of TOML in UTF-8, or an empty string."""
    start = file.read_bytes()[:4096]
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "text in UTF-16"
    lines = start.decode(errors="replace").splitlines()
    first = next((line for line in lines if line.strip(" \t#")), "")
    if first.startswith("{") or file.suffix == ".json":
        return "JSON"
    if file.suffix in (".yaml", ".yml") or re.match(r"---|[\w.]+:(\s|$)", first):
        return "YAML"
    return ""


def _given_twice(error: str, text: str) -> str:
    """Return the key or table that is given twice, and its line, if that is the error."""
    if not re.search("overwrite a value|declare .* twice", error):
        return ""
    lines = text.splitlines()
    # The line where the value ends; tomllib gives none for the end of the file.
    place = re.search(r"at line (\d+)", error)
    number = int(place[1]) if place else len(lines)
    while number > 1 and not re.match(r"\s*(\[+)?[\w.\"' -]+(?(1)\]|=)", lines[number - 1]):
        number -= 1
    name = re.sub(r"\s*(=|#).*", "", lines[number - 1]).strip()
    return f"line {number}: {name} is given twice; remove one"


def to_toml(config: JobConfig) -> str:
    """Write the whole config as TOML, from which load_config restores the same config."""
    return values_to_toml({key: value_of(config, key) for key in KEYS})


def values_to_toml(values: Mapping[str, Any]) -> str:
    """Write the values of dotted keys as TOML."""
    blocks: dict[str, list[str]] = {}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        blocks.setdefault(section, [f"[{section}]"]).append(f"{name} = {toml_value(value)}")
    return "\n\n".join("\n".join(block) for block in blocks.values()) + "\n"


def toml_value(value: Any) -> str:
    """Write a value as TOML; null, which TOML lacks, becomes "none", which load_config reads."""
    if value is None:
        value = "none"
    if isinstance(value, (bool, str)):
        text = json.dumps(value, ensure_ascii=False)
        # The only control character that JSON allows and TOML does not.
        return text.replace("\x7f", "\\u007f")
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, Section):
        return toml_value(value.model_dump())
    if isinstance(value, dict):
        fields = ", ".join(f"{name} = {toml_value(field)}" for name, field in value.items())
        return f"{{ {fields} }}" if value else "{}"
    return str(value)


def toml_differences(old: str, new: str) -> dict[str, str]:
    """Return a readable pair of values for each dotted key that differs between two TOML texts."""

    def show(values: dict[str, Any], key: str) -> str:
        return json.dumps(values[key]) if key in values else "not set"

    before = flatten(tomllib.loads(old))
    after = flatten(tomllib.loads(new))
    differences = {}
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            differences[key] = f"{show(before, key)} -> {show(after, key)}"
    return differences


def flatten(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return values by dotted key."""
    flat: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat
