"""Documentation from the schema: --help, docs/config.md and the JSON schema for editors."""

import json
import textwrap

from titanlite.config.legal import legal
from titanlite.config.schema import KEYS, NEEDS, SECTIONS, JobConfig
from titanlite.config.section import MOST
from titanlite.config.toml import toml_value
from titanlite.config.torchtitan import DIFFERENT, FOREIGN, NEW
from titanlite.errors import HELP_COLUMNS, columns

_INTRODUCTION = """# Config keys

Written by `titanlite config --markdown` from the docstrings in titanlite/config/schema.py.

A config is TOML; any key can be given on the command line as `--section.key VALUE`. Precedence:
command line > later file > earlier file > default. A list of text may be comma-separated words,
`--model.freeze norm.weight,output.weight`; a switch is `--section.key` (true), `--section.no_key`
or `--section.key=false`. All errors are reported before anything starts (exit code 2).

**+**: TorchTitan (v0.2.2) does not have the key. **≠**: TorchTitan has another default or meaning.
"""
_FOREIGN_KEYS = """## Keys of TorchTitan that titanlite does not have

A value that switches the feature off is accepted, so that a config loads unchanged; any other is
refused by name.

| keys | accepted | otherwise |
|---|---|---|"""


def help_text(search: str = "") -> str:
    """Return the keys with `search` in their names or meanings, with defaults and meanings, for a
    terminal.
    """
    lines = []
    for name, cls in SECTIONS.items():
        rows = []
        for row in _rows(name):
            if search.lower() in f"{name}.{row[0]} {row[3]}".lower():
                rows.append(row)
        if not rows:
            continue
        head = f"[{name}]  {_one_line(cls.__doc__)}"
        indent = " " * 6
        lines += textwrap.wrap(head, columns(HELP_COLUMNS), subsequent_indent=indent)
        for key, default, _, meaning in rows:
            lines.append(f"  --{name}.{key} = {default}")
            lines += textwrap.wrap(
                meaning, columns(HELP_COLUMNS), initial_indent=indent, subsequent_indent=indent
            )
        lines.append("")
    return "\n".join(lines)


def json_schema() -> str:
    """Return the JSON schema for the completion of TOML files in editors."""
    text = json.dumps(JobConfig.model_json_schema(), indent=1, ensure_ascii=False)
    return text.replace(r"\n", " ") + "\n"  # line breaks in docstrings


def markdown() -> str:
    """Return the text of docs/config.md."""
    out = [_INTRODUCTION]
    for name, cls in SECTIONS.items():
        rows = _rows(name)
        if rows:
            out += [f"## [{name}]", "", _one_line(cls.__doc__), ""]
            out += ["| key | default | legal values | meaning |", "|---|---|---|---|"]
            for key, default, values, meaning in rows:
                full = f"{name}.{key}"
                mark = " **+**" if full in NEW else ""
                difference = ""
                if full in DIFFERENT:
                    difference = f" **≠** ({DIFFERENT[full]})"
                cells = [f"`{key}`{mark}", f"`{default}`", values, meaning + difference]
                out.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
            out.append("")
    out.append(_FOREIGN_KEYS)
    rows = dict[tuple[str, str], list[str]]()
    for key, known in FOREIGN.items():
        accepted = "any value"
        if known.off is not None:
            accepted = ", ".join(f"`{toml_value(value)}`" for value in known.off) or "never"
        otherwise = known.instead or "tunes a feature that titanlite does not have"
        rows.setdefault((accepted, otherwise), []).append(f"`{key}`")
    for (accepted, otherwise), keys in rows.items():
        out.append(f"| {', '.join(keys)} | {accepted} | {otherwise} |")
    return "\n".join(out) + "\n"


def _rows(section: str) -> list[tuple[str, str, str, str]]:
    """Return key, default, legal values and meaning of a section's own keys."""
    rows = list[tuple[str, str, str, str]]()
    for full, info in KEYS.items():
        name, _, key = full.rpartition(".")
        if name != section:
            continue
        # Without the bound that all whole numbers have.
        values = legal(info.annotation, info.metadata).replace(f" and <= {MOST}", "")
        meaning = _one_line(info.description) + _conditions(full)
        rows.append((key, toml_value(info.default), values, meaning))
    return rows


def _conditions(key: str) -> str:
    """Return sentences about what a key needs."""
    text = ""
    for needs in NEEDS[key]:
        lacks = [need.lack for need in needs.conditions if need.key != key]
        verdict = "Refused" if needs.why else "No effect"
        if lacks:
            text += f" {verdict} {', or '.join(lacks)}."
    return text


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())
