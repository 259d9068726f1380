"""From files and command-line overrides to a JobConfig: one tree, judged once, every fault named.

Precedence: command line > later file > earlier file > default. What fields mean together is judged by check.py.
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from titanlite.config.schema import JobConfig, Section, keys, legal, sections
from titanlite.config.torchtitan import FLOAT8_CONVERTERS, RENAMED, foreign

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEFAULT_CONFIG = "debug.toml"
SHIPPED = Path(__file__).parent.parent / "train_configs"


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong: about which key (or file, or flag), with which value from where, and why."""

    key: str
    why: str
    value: Any = None
    origin: str = ""


class ConfigError(Exception):
    """All faults of a configuration."""

    def __init__(self, faults: list[Fault]) -> None:
        super().__init__()
        self.faults = faults

    def __str__(self) -> str:
        blocks: dict[str, list[str]] = {}
        for fault in self.faults:
            head = fault.key
            if fault.value is not None:
                head += f" = {toml_value(fault.value)}"
            if fault.origin:
                head += f"   ({fault.origin})"
            blocks.setdefault(head, []).append(f"      {fault.why}")
        count = "1 fault" if len(blocks) == 1 else f"{len(blocks)} faults"
        lines = [line for head, whys in blocks.items() for line in (f"  {head}", *whys)]
        return "\n".join([f"titanlite: {count} in what was asked for; nothing was started", *lines])


@dataclass(frozen=True)
class Entry:
    """A value as it was given."""

    value: Any
    origin: str
    text: str | None = None
    """On the command line: the words before they were read as TOML."""


@dataclass
class CommandLine:
    """What stands behind `titanlite train` or a worker's module name."""

    files: list[str] = field(default_factory=list)
    overrides: dict[str, Entry] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)


def parse_command_line(argv: list[str], environ: Mapping[str, str]) -> CommandLine:
    """Split `--config FILE…` from `--section.key value` overrides."""
    line = CommandLine()
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            line.faults.append(Fault(word, "is not an option; options look like --section.key VALUE"))
            continue
        name, equals, text = word[2:].partition("=")
        name = name.replace("-", "_")
        values = [text] if equals else []
        while not equals and rest and not rest[0].startswith("--") and (name == "config" or not values):
            values.append(rest.pop(0))
        if name in ("config", "job.config_file"):
            if not values:
                line.faults.append(Fault(word, "needs the name of a TOML file"))
            line.files += values
        elif "." not in name:
            full = [f"--{key}" for key in keys() if key.rpartition(".")[2] == name]
            known = " or ".join(full) or "--config, --help and --section.key VALUE"
            line.faults.append(Fault(word, f"is not an option; {'did you mean' if full else 'known are'} {known}"))
        else:
            line.overrides.update([_override(name, values)])
    if not line.files:
        line.files = [environ.get("CONFIG_FILE") or DEFAULT_CONFIG]
    return line


def _override(name: str, values: list[str]) -> tuple[str, Entry]:
    section, _, last = name.rpartition(".")
    if values:
        return name, Entry(_read_value(values[0]), "command line", values[0])
    if last.startswith("no_") and name not in keys():
        return f"{section}.{last[3:]}", Entry(False, "command line")
    return name, Entry(True, "command line")


def _read_value(text: str) -> Any:
    """A TOML value; what is none is a string."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if parsed.keys() == {"value"} else text


def find_config(name: str) -> Path | None:
    """A config file as given, else in train_configs/."""
    return next((path for path in (Path(name), SHIPPED / name) if path.is_file()), None)


def shipped_configs() -> list[str]:
    return sorted(path.name for path in SHIPPED.glob("*.toml"))


@dataclass(frozen=True)
class Loaded:
    """A config section by section: invalid fields hold their defaults and are listed."""

    config: JobConfig
    entries: dict[str, Entry]
    invalid: set[str]
    faults: list[Fault]


def load(line: CommandLine) -> Loaded:
    """Read the files, lay the overrides over them, and judge every key by itself."""
    faults = list(line.faults)
    tree: dict[str, Entry] = {}
    for name in line.files:
        path = find_config(name)
        if path is None:
            faults.append(Fault(name, f"no such file, here or in train_configs/ ({', '.join(shipped_configs())})"))
            continue
        try:
            _flatten(tomllib.loads(path.read_text(encoding="utf-8")), "", name, tree)
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
            faults.append(Fault(name, f"cannot be read as TOML: {error}"))
    for key, entry in line.overrides.items():
        _flatten({key: entry}, "", "command line", tree)
    invalid = _translate(tree, faults)
    config = _build(JobConfig, "", tree, invalid, faults)
    assert isinstance(config, JobConfig)
    return Loaded(config, tree, invalid, faults)


_SECTIONS = dict(sections())
_KEYS = keys()
_TABLES = tuple(f"{key}." for key, info in _KEYS.items() if legal(info.annotation) == "a table")


def _flatten(table: Mapping[str, Any], prefix: str, origin: str, tree: dict[str, Entry]) -> None:
    """Add every leaf to the tree under its dotted name."""
    for name, value in table.items():
        key = prefix + name
        if isinstance(value, dict) and key not in _KEYS | RENAMED:
            _flatten(value, key + ".", origin, tree)
            continue
        entry = value if isinstance(value, Entry) else Entry(value, origin)
        key = RENAMED.get(key, key)
        if key + "." in _TABLES and isinstance(entry.value, dict):
            tree.update({f"{key}.{k}": Entry(v, entry.origin) for k, v in entry.value.items()})
        else:
            tree[key] = entry


def _translate(tree: dict[str, Entry], faults: list[Fault]) -> set[str]:
    """Take out of the tree all keys that the schema doesn't have, with a fault or TorchTitan's leave."""
    invalid = set()
    for key, entry in list(tree.items()):
        if key in _KEYS or key.startswith(_TABLES):
            continue
        del tree[key]
        known = foreign(key)
        if known is not None:
            if known.off is not None and entry.value not in known.off:
                what = "TorchTitan's key for what titanlite does not have: " if known.off else ""
                faults.append(Fault(key, what + known.instead, entry.value, entry.origin))
        elif key in _SECTIONS:
            faults.append(Fault(key, f"is a section: write [{key}] or --{key}.KEY", entry.value, entry.origin))
        else:
            faults.append(Fault(key, _suggest(key), entry.value, entry.origin))
    converters = tree.get("model.converters")
    if converters is not None and isinstance(converters.value, list):
        for name in converters.value:
            if name in FLOAT8_CONVERTERS:
                tree.setdefault(
                    "quantize.linear.float8.enable", Entry(True, f"{converters.origin}, by model.converters")
                )
    return invalid


def _suggest(key: str) -> str:
    """The nearest right spelling over all dotted keys: same section first, then the same name elsewhere."""
    section, _, last = key.rpartition(".")
    same_name = [k for k in _KEYS if k.rpartition(".")[2] == last]
    close = difflib.get_close_matches(key, _KEYS, n=1, cutoff=0.75) or same_name[:1]
    close = close or difflib.get_close_matches(key, _KEYS, n=1, cutoff=0.6)
    if close:
        return f"there is no such key; the nearest is {close[0]}"
    if section in _SECTIONS:
        return f"there is no such key; [{section}] has: {', '.join(_SECTIONS[section].model_fields)}"
    return f"there is no section [{section or key}]; there are: {', '.join(_SECTIONS)}"


def _build(
    cls: type[Section], prefix: str, tree: dict[str, Entry], invalid: set[str], faults: list[Fault]
) -> Section:
    """One section from the tree; fields that don't fit are reported, and keep their defaults."""
    values: dict[str, Any] = {}
    for name, info in cls.model_fields.items():
        key = prefix + name
        if key in _SECTIONS:
            values[name] = _build(_SECTIONS[key], key + ".", tree, invalid, faults)
        elif key + "." in _TABLES:
            entries = {k[len(key) + 1 :]: e.value for k, e in tree.items() if k.startswith(key + ".")}
            if key in tree:
                faults.append(Fault(key, f"is a table: set --{key}.NAME VALUE", tree[key].value, tree[key].origin))
                invalid.add(key)
            elif entries:
                values[name] = entries
        elif key in tree:
            values[name] = _as_text(tree[key]) if info.annotation is str else tree[key].value
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        bad = {str(e["loc"][0]) for e in error.errors()}
    for name in cls.model_fields:
        if name in bad:
            info, entry = cls.model_fields[name], tree[prefix + name]
            why = f"must be {legal(info.annotation, info.metadata)}"
            if entry.value == "float16":
                why += "; float16 would need loss scaling, which there is none of here"
            faults.append(Fault(prefix + name, why, entry.value, entry.origin))
            invalid.add(prefix + name)
    return cls.model_validate({name: value for name, value in values.items() if name not in bad})


def _as_text(entry: Entry) -> Any:
    """For a text field: words of the command line stay words, even if they look like a number."""
    return entry.value if entry.text is None or isinstance(entry.value, str) else entry.text


def toml_value(value: Any) -> str:
    """A value as TOML; what TOML lacks (null) is written "none", which load() reads."""
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml_value(v) for v in value) + "]"
    if isinstance(value, Section):
        return toml_value(value.model_dump())
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{k} = {toml_value(v)}" for k, v in value.items()) + " }" if value else "{}"
    return str(value)


def to_toml(config: JobConfig) -> str:
    """The whole config as TOML that load() reads back to the same config."""
    blocks = []
    for name, cls in _SECTIONS.items():
        section: Any = config
        for part in name.split("."):
            section = getattr(section, part)
        values = {key: getattr(section, key) for key in cls.model_fields if f"{name}.{key}" not in _SECTIONS}
        if values:
            blocks.append("\n".join([f"[{name}]", *(f"{key} = {toml_value(v)}" for key, v in values.items())]))
    return "\n\n".join(blocks) + "\n"
