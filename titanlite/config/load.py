"""From files and command-line overrides to a JobConfig: one tree, checked once, with every fault
named.

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
from titanlite.config.legal import choices, legal, lists_words
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


@dataclass(frozen=True)
class ConfigFault:
    """One error: the key (or file, or flag), the reason, the value and where the value comes
    from.
    """

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
        lines = [line for title, reasons in blocks.items() for line in (f"  {title}", *reasons)]
        plural = "s" * (len(blocks) != 1)
        count = f"{len(blocks)} configuration error{plural}"
        if all(fault.why.startswith(_NO_OPTION) for fault in self.faults):
            count = f"{len(blocks)} error{plural} in the command line"
        return "\n".join([f"{count}; nothing was started", *lines])


@dataclass(frozen=True)
class Entry:
    """A value as it was given, and where."""

    value: Any
    origin: str

    def fault(self, key: str, why: str) -> ConfigFault:
        return ConfigFault(key, why, self.value, self.origin)


@dataclass
class CommandLine:
    """The arguments of `titanlite train` or of a worker."""

    files: list[str] = field(default_factory=list)
    names_files: bool = False
    """Whether the files are its own: not of CONFIG_FILE, nor the default."""
    overrides: dict[str, Any] = field(default_factory=dict)
    repeated: list[str] = field(default_factory=list)
    """Keys that were given more than once: the last value counts."""
    faults: list[ConfigFault] = field(default_factory=list)
    old_spelling: bool = False
    """Whether TorchTitan's option named the file."""

    def put(self, key: str, value: Any) -> None:
        if self.overrides.get(key, value) != value and key not in self.repeated:
            self.repeated.append(key)
        self.overrides[key] = value


def parse_command_line(argv: list[str], environ: Mapping[str, str]) -> CommandLine:
    """Split `--config FILE…` from `--section.key value` overrides."""
    line = CommandLine()
    rest = [argument.encode(errors="replace").decode() for argument in argv]
    line.faults = [
        ConfigFault(text, "is not UTF-8, as TOML must be") for text in rest if text not in argv
    ]
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--") or argument == "--":
            if argument.startswith("-") and rest and not rest[0].startswith("-"):
                del rest[0]  # its value
            hint = _option_meant(argument)
            line.faults.append(ConfigFault(argument, f"{_NO_OPTION}; {hint}"))
            continue
        name, equals, text = argument[2:].partition("=")
        name = name.replace("-", "_")
        values = [text] if equals else []
        dash = "-" if name == "config" else "--"  # a value may be a negative number
        while (
            not equals
            and rest
            and not rest[0].startswith(dash)
            and (name == "config" or not values)
        ):
            values.append(rest.pop(0))
        if name in ("config", "job.config_file"):
            if "" in (values or [""]):
                line.faults.append(ConfigFault(argument, "needs the name of a TOML file"))
            line.files += filter(None, values)
            line.old_spelling |= name != "config"
        elif "." not in name:
            hint = _keys_named(name)
            line.faults.append(ConfigFault(argument, f"{_NO_OPTION}; {hint}"))
        elif values:
            line.put(name, _read_value(name, values[0]))
        elif name in KEYS and "true or false" not in (
            values_of := legal(KEYS[name].annotation, KEYS[name].metadata)
        ):
            line.faults.append(ConfigFault(argument, f"needs a value: {values_of}"))
        else:  # --section.key switches on, --section.no_key switches off
            on = name in KEYS or ".no_" not in name
            line.put(name if on else name.replace(".no_", "."), on)
    line.names_files = bool(line.files)
    line.files = line.files or [environ.get("CONFIG_FILE") or DEFAULT_CONFIG]
    return line


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
    """Read a TOML value; anything else is a string, and so is a number that is given to a key for
    text. To a key for a list of text, a string is words between commas, as TorchTitan reads it.
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
    """Return the words between commas; those of a list that a shell took the quotes from, too."""
    inside = text[1:].removesuffix("]") if text.startswith("[") else text
    return [word for part in inside.split(",") if (word := part.strip(" \"'"))]


def shipped_configs() -> list[str]:
    """Return the names of the configs in train_configs/."""
    return sorted(path.name for path in SHIPPED.glob("*.toml"))


@dataclass(frozen=True)
class Loaded:
    """A config with a list of its invalid fields, which have their defaults."""

    config: JobConfig
    entries: dict[str, Entry]
    invalid: set[str]
    faults: list[ConfigFault]
    notices: Sequence[str] = ()
    """Lines about what was given and does not count."""

    @property
    def given(self) -> list[str]:
        """The keys that the user gave, not a config that ships."""
        shipped = [name for name in shipped_configs() if not Path(name).is_file()]
        return [key for key, entry in self.entries.items() if entry.origin not in shipped]


def load(line: CommandLine) -> Loaded:
    """Read the files, lay the overrides over them, and check every key by itself."""
    faults = list(line.faults)
    tree: dict[str, Entry] = {}
    for name in line.files:
        try:
            path = next((path for path in (Path(name), SHIPPED / name) if path.is_file()), None)
            if path is None:
                why = f"no such file, here or in train_configs/ ({', '.join(shipped_configs())})"
                faults.append(
                    ConfigFault(
                        name, "is a folder; name a TOML file in it" if Path(name).is_dir() else why
                    )
                )
                continue
            _flatten(read_toml(path), "", name, tree)
            for key, entry in tree.items():  # the files that ship with a config are next to it
                if path.parent == SHIPPED and str(entry.value).startswith(f"{SHIPPED.name}/"):
                    tree[key] = Entry(str(SHIPPED.parent / entry.value), entry.origin)
        except (UserError, OSError) as error:
            faults.append(ConfigFault(name, str(error)))
    _flatten(line.overrides, "", "command line", tree)
    notices = _notices(line, tree)
    faults += _remove_unknown(tree)
    _apply_converters(tree)
    config, invalid = _build(tree)
    if config.model.flavor == "hf":
        try:
            # A name from elsewhere, as that of the default config, is not meant for the folder.
            is_given = (
                "model.name" in tree and tree["model.name"].origin == tree["model.flavor"].origin
            )
            file, found = read_flavor(config, is_given)
            _flatten(found, "", file, below := dict[str, Entry]())
            if file and not is_given:
                tree.pop("model.name", None)
            for key, entry in tree.items():
                _flatten({key: entry.value}, "", entry.origin, below)
            config, invalid = _build(tree := below)
        except UserError as error:
            invalid["model.flavor"] = str(error)
    faults += [tree[key].fault(key, why) for key, why in invalid.items()]
    return Loaded(config, tree, set(invalid), faults, notices)


def _notices(line: CommandLine, tree: Mapping[str, Entry]) -> list[str]:
    """Return lines about keys that were given and do not count."""
    lines = []
    if line.repeated:
        last = ", ".join(f"{key} = {toml_value(line.overrides[key])}" for key in line.repeated)
        lines.append(f"given more than once, the last one counts: {last}")
    if tuning := [key for key in tree if (found := foreign(key)) and found.off is None]:
        why = "keys for features that titanlite does not have"
        lines.append(f"no effect, TorchTitan's {why}: {', '.join(tuning)}")
    is_titans = line.old_spelling or any(map(foreign, tree))
    flavor = tree.get("model.flavor", Entry("", ""))
    is_own = flavor.origin in shipped_configs()
    if is_titans and not is_own and str(flavor.value).startswith("debugmodel"):
        lines.append(f"model.flavor: {DIFFERENT['model.flavor']}")
    return lines


def load_valid(line: CommandLine) -> Loaded:
    """Do the same, and raise a ConfigError with all faults if there are any."""
    loaded = load(line)
    if loaded.faults:
        raise ConfigError(loaded.faults)
    return loaded


def _flatten(table: Mapping[str, Any], prefix: str, origin: str, tree: dict[str, Entry]) -> None:
    """Add every leaf of a table to the tree under its dotted name."""
    for name, value in table.items():
        key = RENAMED.get(prefix + name, prefix + name)
        if isinstance(value, dict) and (
            key in _TABLES or not _is_known(key) or (value and key not in KEYS)
        ):
            _flatten(value, key + ".", origin, tree)
            continue
        for other in [
            k for k in tree if f"{k}.".startswith(f"{key}.") or f"{key}.".startswith(f"{k}.")
        ]:
            if (
                _is_known(other) and other not in KEYS
            ):  # a table's field and one that it contains: the later counts
                del tree[other]
        tree[key] = Entry(value, origin)


def _is_known(key: str) -> bool:
    return key in KEYS or any(key.startswith(f"{table}.") for table in _TABLES)


def _remove_unknown(tree: dict[str, Entry]) -> Iterator[ConfigFault]:
    """Remove the keys that the schema lacks: a fault each, unless it is TorchTitan's and switches
    nothing on.

    Unknown sections are one fault, however many keys they have.
    """
    unknown: dict[str, str] = {}
    for key, entry in list(tree.items()):
        if _is_known(key) and key not in _TABLES:
            continue
        del tree[key]
        if known := foreign(key):
            if known.off is not None and entry.value not in known.off:
                yield entry.fault(key, f"{known.instead} (a key of TorchTitan)")
        elif key in SECTIONS or key in _TABLES:
            yield entry.fault(key, f"is a table: write [{key}] or --{key}.NAME VALUE")
        elif close := _nearest_key(key):
            yield entry.fault(key, f"unknown key; did you mean {close}?")
        elif (section := key.rpartition(".")[0]) in SECTIONS:
            yield entry.fault(
                key, f"unknown key; [{section}] has: {', '.join(SECTIONS[section].model_fields)}"
            )
        else:
            unknown[f"[{section or key}]"] = entry.origin
    if unknown:
        why = f"unknown section{'s' * (len(unknown) > 1)}; known are: {', '.join(SECTIONS)}"
        yield ConfigFault(
            ", ".join(unknown), why, origin=" and ".join(dict.fromkeys(unknown.values()))
        )


def _apply_converters(tree: dict[str, Entry]) -> None:
    """Switch [quantize.linear.float8] on where model.converters names it, as TorchTitan's configs
    do.
    """
    converters = tree.get("model.converters", Entry([], ""))
    if isinstance(converters.value, list) and any(
        name in FLOAT8_CONVERTERS for name in converters.value
    ):
        enable = Entry(True, f"{converters.origin}, by model.converters")
        tree.setdefault("quantize.linear.float8.enable", enable)


def _nearest_key(key: str) -> str:
    """Return the key that is meant: the same name in another section, else the nearest spelling of
    all keys.
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
    """Return the config, and why values of keys are invalid: such keys have their defaults."""
    try:
        return config_of({key: entry.value for key, entry in tree.items()}), {}
    except ValidationError as error:
        problems, bad = error.errors(), dict[str, str]()
    for problem in problems:  # a location goes deeper than the key where a type has parts
        names = [*map(str, problem["loc"])]
        depth, key = next(
            (n, k) for n, k in enumerate(accumulate(names, "{}.{}".format), 1) if k in KEYS
        )
        why = {"missing": "is missing", "extra_forbidden": "is unknown"}.get(
            problem["type"], problem["msg"]
        )
        if names[depth:] and names[depth].isdigit():
            entry = ": ".join([f"entry {int(names[depth]) + 1}", *names[depth + 1 :]])
            bad[key] = f"{bad.get(key, '')}; {entry} {why.replace('Input should be', 'must be')}"
        given, hint = tree[key], ""
        if isinstance(given.value, str) and lists_words(KEYS[key].annotation):
            words = _words(given.value)
            typed = given.origin == "command line"
            hint = f": {','.join(words) if typed else toml_value(words)}"
        bad.setdefault(key, hint)
    invalid: dict[str, str] = {}
    for key in (key for key in KEYS if key in bad):
        invalid[key] = f"must be {legal(KEYS[key].annotation, KEYS[key].metadata)}{bad[key]}"
        if isinstance(tree[key].value, str) and (
            close := nearest(tree[key].value, choices(KEYS[key].annotation))
        ):
            invalid[key] += f'; did you mean "{close}"?'
        invalid[key] += "".join(
            f"; {value} {why}" for value, why in NOT_DONE.items() if tree[key].value == value
        )
    return config_of({key: entry.value for key, entry in tree.items() if key not in bad}), invalid
