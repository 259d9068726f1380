"""From files and command-line overrides to a JobConfig: one tree, checked once, with every fault named.

Precedence: command line > later file > earlier file > default. Rules between keys are in rules/.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from titanlite.config.schema import JobConfig, Section, keys, legal, sections
from titanlite.config.toml import toml_value, tomllib
from titanlite.config.torchtitan import FLOAT8_CONVERTERS, RENAMED, foreign
from titanlite.errors import UserError

DEFAULT_CONFIG = "debug.toml"
SHIPPED = Path(__file__).parent.parent / "train_configs"

_SECTIONS = dict(sections())
_KEYS = keys()
_TABLES = tuple(f"{key}." for key, info in _KEYS.items() if legal(info.annotation) == "a table")


@dataclass(frozen=True)
class Fault:
    """One error: the key (or file, or flag), the reason, the value and where the value comes from."""

    key: str
    why: str
    value: Any = None
    origin: str = ""


class ConfigError(UserError):
    """All faults of a configuration."""

    def __init__(self, faults: list[Fault]) -> None:
        super().__init__()
        self.faults = faults

    def __str__(self) -> str:
        blocks: dict[str, list[str]] = {}
        for fault in self.faults:
            title = fault.key
            if fault.value is not None:
                title += f" = {toml_value(fault.value)}"
            if fault.origin:
                title += f"   ({fault.origin})"
            blocks.setdefault(title, []).append(f"      {fault.why}")
        lines = [line for title, reasons in blocks.items() for line in (f"  {title}", *reasons)]
        count = f"{len(blocks)} configuration error{'s' * (len(blocks) != 1)}"
        return "\n".join([f"{count}; nothing was started", *lines])


@dataclass(frozen=True)
class Entry:
    """A value as it was given."""

    value: Any
    origin: str
    text: str | None = None
    """On the command line: the text before it was read as TOML."""


@dataclass
class CommandLine:
    """The arguments of `titanlite train` or of a worker."""

    files: list[str] = field(default_factory=list)
    overrides: dict[str, Entry] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)


def parse_command_line(argv: list[str], environ: Mapping[str, str]) -> CommandLine:
    """Split `--config FILE…` from `--section.key value` overrides."""
    line = CommandLine()
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--") or argument == "--":
            line.faults.append(Fault(argument, "is not an option; options look like --section.key VALUE"))
            continue
        name, equals, text = argument[2:].partition("=")
        name = name.replace("-", "_")
        values = [text] if equals else []
        while not equals and rest and not rest[0].startswith("--") and (name == "config" or not values):
            values.append(rest.pop(0))
        if name in ("config", "job.config_file"):
            if not values:
                line.faults.append(Fault(argument, "needs the name of a TOML file"))
            line.files += values
        elif "." not in name:
            matches = [f"--{key}" for key in keys() if key.rpartition(".")[2] == name]
            known = " or ".join(matches) or "--config, --help and --section.key VALUE"
            hint = "did you mean" if matches else "known are"
            line.faults.append(Fault(argument, f"is not an option; {hint} {known}"))
        else:
            line.overrides.update([_override(name, values)])
    if not line.files:
        line.files = [environ.get("CONFIG_FILE") or DEFAULT_CONFIG]
    return line


def _override(name: str, values: list[str]) -> tuple[str, Entry]:
    """Return the key and value of an override; without a value it is true, or false as `no_KEY`."""
    section, _, last = name.rpartition(".")
    if values:
        return name, Entry(_read_value(values[0]), "command line", values[0])
    if last.startswith("no_") and name not in keys():
        return f"{section}.{last[3:]}", Entry(False, "command line")
    return name, Entry(True, "command line")


def _read_value(text: str) -> Any:
    """Read a TOML value; anything else is a string."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if parsed.keys() == {"value"} else text


def find_config(name: str) -> Path | None:
    """Find a config file as given, else in train_configs/."""
    return next((path for path in (Path(name), SHIPPED / name) if path.is_file()), None)


def shipped_configs() -> list[str]:
    """Return the names of the configs in train_configs/."""
    return sorted(path.name for path in SHIPPED.glob("*.toml"))


@dataclass(frozen=True)
class Loaded:
    """A config in which invalid fields have their defaults and are listed."""

    config: JobConfig
    entries: dict[str, Entry]
    invalid: set[str]
    faults: list[Fault]


def load(line: CommandLine) -> Loaded:
    """Read the files, lay the overrides over them, and check every key by itself."""
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
    _remove_unknown(tree, faults)
    _apply_converters(tree)
    invalid: set[str] = set()
    config = _build(JobConfig, "", tree, invalid, faults)
    assert isinstance(config, JobConfig)
    return Loaded(config, tree, invalid, faults)


def _flatten(table: Mapping[str, Any], prefix: str, origin: str, tree: dict[str, Entry]) -> None:
    """Add every leaf of a table to the tree under its dotted name."""
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


def _remove_unknown(tree: dict[str, Entry], faults: list[Fault]) -> None:
    """Remove the keys that the schema lacks: a fault each, unless it is TorchTitan's and asks for nothing."""
    for key, entry in list(tree.items()):
        if key in _KEYS or key.startswith(_TABLES):
            continue
        del tree[key]
        known = foreign(key)
        if known is not None:
            if known.off is not None and entry.value not in known.off:
                faults.append(Fault(key, f"{known.instead} (a key of TorchTitan)", entry.value, entry.origin))
        elif key in _SECTIONS:
            faults.append(Fault(key, f"is a section: write [{key}] or --{key}.KEY", entry.value, entry.origin))
        else:
            faults.append(Fault(key, _suggest(key), entry.value, entry.origin))


def _apply_converters(tree: dict[str, Entry]) -> None:
    """Switch [quantize.linear.float8] on where model.converters names it, as TorchTitan's configs do."""
    converters = tree.get("model.converters")
    names = converters.value if converters and isinstance(converters.value, list) else []
    if converters and any(name in FLOAT8_CONVERTERS for name in names):
        enable = Entry(True, f"{converters.origin}, by model.converters")
        tree.setdefault("quantize.linear.float8.enable", enable)


def _suggest(key: str) -> str:
    """Name the nearest right spelling over all dotted keys: same section first, then the same name elsewhere."""
    section, _, last = key.rpartition(".")
    same_name = [known for known in _KEYS if known.rpartition(".")[2] == last]
    close = difflib.get_close_matches(key, _KEYS, n=1, cutoff=0.75) or same_name[:1]
    close = close or difflib.get_close_matches(key, _KEYS, n=1, cutoff=0.6)
    if close:
        return f"unknown key; did you mean {close[0]}?"
    if section in _SECTIONS:
        return f"unknown key; [{section}] has: {', '.join(_SECTIONS[section].model_fields)}"
    return f"unknown section [{section or key}]; known are: {', '.join(_SECTIONS)}"


def _build(
    cls: type[Section], prefix: str, tree: dict[str, Entry], invalid: set[str], faults: list[Fault]
) -> Section:
    """Build one section from the tree; fields that don't fit are reported and have their defaults."""
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
            entry = tree[key]  # a text from the command line is taken as typed, even if it looks like a number
            as_typed = info.annotation is str and entry.text is not None and not isinstance(entry.value, str)
            values[name] = entry.text if as_typed else entry.value
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        bad = {str(e["loc"][0]) for e in error.errors()}
    for name in (name for name in cls.model_fields if name in bad):
        info, entry = cls.model_fields[name], tree[prefix + name]
        why = f"must be {legal(info.annotation, info.metadata)}"
        if entry.value == "float16":
            why += "; float16 would need loss scaling, which titanlite does not do"
        faults.append(Fault(prefix + name, why, entry.value, entry.origin))
        invalid.add(prefix + name)
    return cls.model_validate({name: value for name, value in values.items() if name not in bad})
