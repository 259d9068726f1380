"""From files and command-line overrides to a JobConfig: one tree, checked once, with every fault
reported.

Precedence: command line > later file > earlier file > default. Rules between keys are in rules/.
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from titanlite.config.config_json import read_flavor
from titanlite.config.legal import legal, legal_words, lists_words
from titanlite.config.schema import KEYS, SECTIONS, JobConfig, config_of
from titanlite.config.toml import read_toml, toml_value, tomllib
from titanlite.config.torchtitan import (
    DIFFERENT,
    FLOAT8_CONVERTERS,
    NOT_DONE,
    OTHER_NAMES,
    RENAMED,
    foreign,
)
from titanlite.errors import UserError, nearest

DEFAULT_CONFIG = "debug.toml"
SHIPPED = Path(__file__).parent.parent / "train_configs"

_TABLES = {key for key, info in KEYS.items() if legal(info.annotation) == "a table"}
_NO_OPTION = "is not an option"
_PROBLEMS = {"missing": "is missing", "extra_forbidden": "is unknown"}
"""Words for types of pydantic's errors; others keep their message."""


@dataclass(frozen=True)
class ConfigFault:
    """One error: the key (or file, or flag), the reason, the value, and its origin."""

    key: str
    why: str
    value: Any = None
    origin: str = ""


class ConfigError(UserError):
    """All faults of a configuration."""

    def __init__(self, faults: list[ConfigFault]) -> None:
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
        lines = list[str]()
        for title, reasons in blocks.items():
            lines += [f"  {title}", *reasons]
        errors = "error" if len(blocks) == 1 else "errors"
        count = f"{len(blocks)} configuration {errors}"
        if all(fault.why.startswith(_NO_OPTION) for fault in self.faults):
            count = f"{len(blocks)} {errors} in the command line"
        return "\n".join([f"{count}; nothing was started", *lines])


@dataclass(frozen=True)
class Entry:
    """A given value, and where it was given."""

    value: Any
    origin: str

    def fault(self, key: str, why: str) -> ConfigFault:
        return ConfigFault(key, why, self.value, self.origin)


@dataclass
class CommandLine:
    """The arguments of `titanlite train` or of a worker."""

    files: list[str] = field(default_factory=list)
    names_files: bool = False
    """Whether it names the files itself, rather than by CONFIG_FILE or by default."""
    overrides: dict[str, Any] = field(default_factory=dict)
    repeated: list[str] = field(default_factory=list)
    """Keys that were given more than once; the last value counts."""
    faults: list[ConfigFault] = field(default_factory=list)
    old_spelling: bool = False
    """Whether TorchTitan's option was used to name the file."""

    def put(self, key: str, value: Any) -> None:
        if self.overrides.get(key, value) != value and key not in self.repeated:
            self.repeated.append(key)
        self.overrides[key] = value


def parse_command_line(argv: list[str], environ: Mapping[str, str]) -> CommandLine:
    """Split `--config FILE…` from `--section.key value` overrides."""
    line = CommandLine()
    rest = []
    for text in argv:
        argument = text.encode(errors="replace").decode()
        if argument != text:
            line.faults.append(ConfigFault(argument, "is not UTF-8, as TOML must be"))
        rest.append(argument)
    while rest:
        argument = rest.pop(0)
        if argument.startswith("--") and argument != "--":
            _read_option(argument, rest, line)
            continue
        if argument.startswith("-") and rest and not rest[0].startswith("-"):
            del rest[0]  # its value
        line.faults.append(ConfigFault(argument, f"{_NO_OPTION}; {_option_meant(argument)}"))
    line.names_files = bool(line.files)
    line.files = line.files or [environ.get("CONFIG_FILE") or DEFAULT_CONFIG]
    return line


def _read_option(argument: str, rest: list[str], line: CommandLine) -> None:
    """Read an option into the line, consuming its values from the rest of the arguments."""
    name, equals, text = argument[2:].partition("=")
    name = name.replace("-", "_")
    values = [text]
    if not equals:
        values = _take_values(rest, several=name == "config")
    if name in ("config", "job.config_file"):
        if not values or "" in values:
            line.faults.append(ConfigFault(argument, "needs the name of a TOML file"))
        line.files += filter(None, values)
        line.old_spelling |= name != "config"
        return
    if "." not in name:
        line.faults.append(ConfigFault(argument, f"{_NO_OPTION}; {_keys_named(name)}"))
        return
    if values:
        line.put(name, _read_value(name, values[0]))
        return
    if name not in KEYS:  # --section.no_key switches off
        line.put(name.replace(".no_", "."), ".no_" not in name)
        return
    legal_values = legal(KEYS[name].annotation, KEYS[name].metadata)
    if "true or false" in legal_values:
        line.put(name, True)
    else:
        line.faults.append(ConfigFault(argument, f"needs a value: {legal_values}"))


def _take_values(rest: list[str], several: bool) -> list[str]:
    """Remove the values of an option from the rest of the arguments, and return them."""
    values = list[str]()
    dash = "-" if several else "--"  # a single value may be a negative number
    while rest and not rest[0].startswith(dash) and (several or not values):
        values.append(rest.pop(0))
    return values


def _option_meant(word: str) -> str:
    """Return a hint about a word that does not begin with two dashes."""
    if word.endswith(".toml"):
        return f"did you mean --config {word}?"
    if word.startswith("-"):
        return f"did you mean --{word.lstrip('-')}?"
    if Path(word).is_dir():
        return f"a saved model is named by --checkpoint {word}, a run by --job.dump_folder {word}"
    return "options look like --section.key VALUE, a list like --section.key a,b"


def _keys_named(name: str) -> str:
    """Return a hint about an option without a section."""
    other = OTHER_NAMES.get(name)
    matches = [f"--{key}" for key in KEYS if key.endswith(f".{name}") or key == other]
    if matches:
        return f"did you mean {' or '.join(matches)}?"
    return "use --config or --section.key VALUE"


def _read_value(key: str, text: str) -> Any:
    """Read a TOML value; anything else is a string, as is a number given to a key for text. For a
    list of text, a string is a comma-separated list, as in TorchTitan.
    """
    kind = KEYS[key].annotation if key in KEYS else None
    try:
        parsed = tomllib.loads(f"value = {text}")
        value = parsed["value"] if len(parsed) == 1 else text
    except tomllib.TOMLDecodeError:
        value = text
    if not isinstance(value, str):
        return text if kind is str else value
    is_list = lists_words(kind) and value != "none" and not value.startswith("[")
    return _words(value) if is_list else value


def _words(text: str) -> list[str]:
    """Return comma-separated words, also those of a list whose quotes a shell has removed."""
    inside = text
    if text.startswith("["):
        inside = text[1:].removesuffix("]")
    words = [part.strip(" \"'") for part in inside.split(",")]
    return [word for word in words if word]


def shipped_configs() -> list[str]:
    """Return the names of the configs in train_configs/."""
    return sorted(path.name for path in SHIPPED.glob("*.toml"))


@dataclass(frozen=True)
class Loaded:
    """A config, and its invalid fields, which have their defaults."""

    config: JobConfig
    entries: dict[str, Entry]
    invalid: set[str]
    faults: list[ConfigFault]
    notices: Sequence[str] = ()
    """Lines about keys that were given but do not count."""

    @property
    def given(self) -> list[str]:
        """The keys that the user gave, rather than a shipped config."""
        shipped = [name for name in shipped_configs() if not Path(name).is_file()]
        return [key for key, entry in self.entries.items() if entry.origin not in shipped]


def load_config(line: CommandLine) -> Loaded:
    """Read the files, apply the overrides, and check each key on its own."""
    faults = list(line.faults)
    tree: dict[str, Entry] = {}
    for name in line.files:
        try:
            _read_file(name, tree)
        except (UserError, OSError) as error:
            faults.append(ConfigFault(name, str(error)))
    _flatten(line.overrides, "", "command line", tree)
    notices = _notices(line, tree)
    faults += _remove_unknown(tree)
    _apply_converters(tree)
    config, invalid = _build(tree)
    if config.model.flavor == "hf":
        try:
            tree = _over_folder(tree, config)
            config, invalid = _build(tree)
        except UserError as error:
            invalid["model.flavor"] = str(error)
    faults += [tree[key].fault(key, why) for key, why in invalid.items()]
    return Loaded(config, tree, set(invalid), faults, notices)


def _read_file(name: str, tree: dict[str, Entry]) -> None:
    """Apply a file to the tree: a local file if it exists, otherwise a shipped one."""
    path = Path(name)
    if not path.is_file():
        path = SHIPPED / name
    if not path.is_file():
        if Path(name).is_dir():
            raise UserError("is a folder; name a TOML file in it")
        known = ", ".join(shipped_configs())
        raise UserError(f"no such file, here or in train_configs/ ({known})")
    _flatten(read_toml(path), "", name, tree)
    if path.parent != SHIPPED:
        return
    for key, entry in tree.items():  # files shipped with a config are next to it
        if str(entry.value).startswith(f"{SHIPPED.name}/"):
            tree[key] = Entry(str(SHIPPED.parent / entry.value), entry.origin)


def _over_folder(tree: dict[str, Entry], config: JobConfig) -> dict[str, Entry]:
    """Return the tree, applied over the keys set by the folder of `model.flavor hf`."""
    # A name from elsewhere, such as the default config, is not meant for the folder.
    name = tree.get("model.name")
    is_given = name is not None and name.origin == tree["model.flavor"].origin
    file, found = read_flavor(config, is_given)
    over: dict[str, Entry] = {}
    _flatten(found, "", file, over)
    for key, entry in tree.items():
        if key != "model.name" or is_given or not file:
            _flatten({key: entry.value}, "", entry.origin, over)
    return over


def _notices(line: CommandLine, tree: Mapping[str, Entry]) -> list[str]:
    """Return lines about keys that were given but do not count."""
    lines = []
    if line.repeated:
        last = ", ".join(f"{key} = {toml_value(line.overrides[key])}" for key in line.repeated)
        lines.append(f"given more than once, the last one counts: {last}")
    tuning = [key for key in tree if _only_tunes(key)]
    if tuning:
        why = "keys for features that titanlite does not have"
        lines.append(f"no effect, TorchTitan's {why}: {', '.join(tuning)}")
    is_titans = line.old_spelling or any(map(foreign, tree))
    flavor = tree.get("model.flavor", Entry("", ""))
    is_own = flavor.origin in shipped_configs()
    if is_titans and not is_own and str(flavor.value).startswith("debugmodel"):
        lines.append(f"model.flavor: {DIFFERENT['model.flavor']}")
    return lines


def _only_tunes(key: str) -> bool:
    known = foreign(key)
    return known is not None and known.off is None


def load_valid(line: CommandLine) -> Loaded:
    """Like `load`, but raise a ConfigError with all faults if there are any."""
    loaded = load_config(line)
    if loaded.faults:
        raise ConfigError(loaded.faults)
    return loaded


def _flatten(table: Mapping[str, Any], prefix: str, origin: str, tree: dict[str, Entry]) -> None:
    """Add every leaf of a table to the tree under its dotted name."""
    for name, value in table.items():
        key = RENAMED.get(prefix + name, prefix + name)
        is_value = key not in _TABLES and _is_known(key) and (not value or key in KEYS)
        if isinstance(value, dict) and not is_value:
            _flatten(value, key + ".", origin, tree)
            continue
        for other in [*tree]:
            overlaps = f"{other}.".startswith(f"{key}.") or f"{key}.".startswith(f"{other}.")
            # For a table's field and one inside it, the later one counts.
            if overlaps and _is_known(other) and other not in KEYS:
                del tree[other]
        tree[key] = Entry(value, origin)


def _is_known(key: str) -> bool:
    return key in KEYS or any(key.startswith(f"{table}.") for table in _TABLES)


def _remove_unknown(tree: dict[str, Entry]) -> Iterator[ConfigFault]:
    """Remove the keys that the schema lacks, and yield a fault for each unless it is TorchTitan's
    and switches nothing on.

    Unknown sections are a single fault, no matter how many keys they have.
    """
    unknown: dict[str, str] = {}
    for key, entry in [*tree.items()]:
        if _is_known(key) and key not in _TABLES:
            continue
        del tree[key]
        known = foreign(key)
        close = _nearest_key(key)
        section = key.rpartition(".")[0]
        if known:
            if known.off is not None and entry.value not in known.off:
                yield entry.fault(key, f"{known.instead} (a key of TorchTitan)")
        elif key in SECTIONS or key in _TABLES:
            yield entry.fault(key, f"is a table: write [{key}] or --{key}.NAME VALUE")
        elif close:
            yield entry.fault(key, f"unknown key; did you mean {close}?")
        elif section in SECTIONS:
            fields = ", ".join(SECTIONS[section].model_fields)
            yield entry.fault(key, f"unknown key; [{section}] has: {fields}")
        else:
            unknown[f"[{section or key}]"] = entry.origin
    if unknown:
        sections = "unknown sections"
        if len(unknown) == 1:
            sections = "unknown section"
        why = f"{sections}; known are: {', '.join(SECTIONS)}"
        origin = " and ".join(dict.fromkeys(unknown.values()))
        yield ConfigFault(", ".join(unknown), why, origin=origin)


def _apply_converters(tree: dict[str, Entry]) -> None:
    """Switch [quantize.linear.float8] on if model.converters names it, as TorchTitan does."""
    converters = tree.get("model.converters", Entry([], ""))
    if isinstance(converters.value, list) and any(
        name in FLOAT8_CONVERTERS for name in converters.value
    ):
        enable = Entry(True, f"{converters.origin}, by model.converters")
        tree.setdefault("quantize.linear.float8.enable", enable)


def _nearest_key(key: str) -> str:
    """Return the key that is probably meant: the same name in another section, otherwise the
    nearest spelling.
    """
    name = key.lower()
    last = name.rpartition(".")[2]
    if last in OTHER_NAMES:
        return OTHER_NAMES[last]
    same = [known for known in KEYS if known.endswith(f".{last}")]
    close = difflib.get_close_matches(name, same, 1, cutoff=0)
    close = close or difflib.get_close_matches(name, KEYS, 1, cutoff=0.75)
    return close[0] if close else ""


def _build(tree: Mapping[str, Entry]) -> tuple[JobConfig, dict[str, str]]:
    """Return the config, and why values are invalid; invalid keys have their defaults."""
    values = {key: entry.value for key, entry in tree.items()}
    try:
        return config_of(values), {}
    except ValidationError as error:
        problems = error.errors()
    parts: dict[str, str] = {}
    for problem in problems:
        key, inside = _split_place([*map(str, problem["loc"])])
        parts.setdefault(key, "")
        if inside and inside[0].isdigit():
            parts[key] += f"; entry {int(inside[0]) + 1}"
            parts[key] += "".join(f": {name}" for name in inside[1:])
            why = _PROBLEMS.get(problem["type"], problem["msg"])
            parts[key] += f" {why.replace('Input should be', 'must be')}"
    invalid = {key: _why_invalid(key, tree[key], parts[key]) for key in KEYS if key in parts}
    return config_of({key: value for key, value in values.items() if key not in parts}), invalid


def _split_place(names: list[str]) -> tuple[str, list[str]]:
    """Return the key of a place in the config, and the place inside its value."""
    for number, key in enumerate(accumulate(names, "{}.{}".format), 1):
        if key in KEYS:
            return key, names[number:]
    raise AssertionError(f"no key at {names}")


def _why_invalid(key: str, entry: Entry, parts: str) -> str:
    """Return what a key's value must be; `parts` has the faults inside the value."""
    annotation = KEYS[key].annotation
    why = f"must be {legal(annotation, KEYS[key].metadata)}"
    if not isinstance(entry.value, str):
        return why + parts
    if lists_words(annotation):
        words = _words(entry.value)
        typed = ",".join(words)
        why += f": {typed if entry.origin == 'command line' else toml_value(words)}"
    why += parts
    close = nearest(entry.value, legal_words(annotation))
    if close:
        why += f'; did you mean "{close}"?'
    if entry.value in NOT_DONE:
        why += f"; {entry.value} {NOT_DONE[entry.value]}"
    return why
