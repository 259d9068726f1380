"""`titanlite models`: the registered models, their flavors and the fields that model.overrides
sets. Imports no torch.
"""

import dataclasses
import textwrap
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

from titanlite.config.options import declare
from titanlite.config.toml import toml_value
from titanlite.errors import UserError, format_table, print_notice
from titanlite.registry import ModelSpec, get_model, model_names
from titanlite.registry.register import import_package

_INTRODUCTION = """# Models

Written by `titanlite models --markdown`; `titanlite models NAME` shows one model in a terminal.

A run takes a flavor with `--model.name NAME --model.flavor FLAVOR`, \
any field with `--model.overrides.FIELD VALUE`,
and with `--model.flavor hf` the fields of \
[a Hugging Face folder](checkpoints.md#hugging-face-export-and-import).

## Compared with TorchTitan 0.2.2

Flavors named by a size are the same models, \
except that its qwen3 235B-A22B has a `rope_theta` of 5,000,000. The debug
flavors here are smaller, with a vocabulary of 256 bytes instead of 2,048 tokens. Losses \
of TorchTitan's
`debug_model.toml` are not comparable.

| | TorchTitan | here |
| --- | --- | --- |
| llama3 debugmodel | dim 256, 6 layers, 16 heads | dim 128, 4 layers, 8 heads |
| qwen3 debugmodel | dim 256, 8 layers, 16 heads, tied | dim 128, 4 layers, 8 heads, untied |
| qwen3 debugmodel_moe | dim 256, 8 layers, 64 experts, top_k 8 \
| dim 128, 4 layers, 8 experts, top_k 2 |

Initial values have the same distributions, except for these:

| | TorchTitan | here |
| --- | --- | --- |
| `w3` | 0.02 / sqrt(2 (layer + 1)), as `w2` | 0.02: it does not write into the residual stream |
| a router | 0.02 / sqrt(2 (layer + 1)) | 0.02, for the same reason |
| output layer, untied | dim^-0.5, cut at 3 deviations \
| dim^-0.5, not cut (1 value in 370 is beyond) |
| embedding with a tied output layer | dim^-0.5, cut at 3 deviations \
| 0.02, as in Hugging Face's models |

The two have not been compared over a long run. \
[Imported](checkpoints.md#hugging-face-export-and-import) weights have none of
these differences.
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the command's options."""
    parser.epilog = "example: titanlite models llama3"
    options = {
        "[NAME]": "a registered model (default: all)",
        "--model.package NAME": ("a package that registers models", str, ""),
        "--markdown": "print docs/models.md",
    }
    declare(parser, options)


def run(arguments: Namespace, overrides: list[str]) -> int:
    """Print the models."""
    import_package(arguments.package)
    names = [arguments.name] if arguments.name else model_names()
    specs = []
    for name in names:
        try:
            specs.append(get_model(name))
        except UserError as error:  # a broken package must not hide the other models
            if arguments.name:
                raise
            print_notice(str(error))
    if arguments.markdown:
        own = [spec for spec in specs if spec.build.startswith("titanlite.models.")]
        print(markdown(own), end="")
    else:
        print("\n\n".join(map(_describe, specs)))
    return 0


def markdown(specs: list[ModelSpec]) -> str:
    """Return the text of docs/models.md."""
    out = [_INTRODUCTION]
    for spec in specs:
        header, *rows = _flavors(spec)
        lines = (header, ["---"] * len(header), *rows)
        fields = ", ".join(f"{name} {default}" for name, default in _fields(spec)[1:])
        out += [f"## {spec.name}\n", *["| " + " | ".join(line) + " |" for line in lines], ""]
        out += [textwrap.fill(f"Fields and their defaults: {fields}.", 120), ""]
        page = Path(__file__).parents[1] / "models" / spec.name / "README.md"
        if page.is_file():
            out.append(page.read_text(encoding="utf-8"))
    return "\n".join(out)


def _describe(spec: ModelSpec) -> str:
    tables = []
    for header, *rows in (_flavors(spec), _fields(spec)):
        tables.append(format_table(rows, header, indent=2))
    return "\n\n".join([spec.name, *tables])


def _flavors(spec: ModelSpec) -> list[list[str]]:
    """Return a header and a row per flavor, with its parameters and its non-default fields."""
    rows = [["flavor", "parameters", "fields other than the defaults"]]
    for name, flavor in spec.flavors.items():
        values = ", ".join(f"{field} {value}" for field, value in _set_fields(flavor))
        size = ""
        if spec.parameters:
            count = spec.parameters(flavor)
            size = f"{count:,}"
            active = spec.active_parameters(flavor) if spec.active_parameters else count
            if active < count:
                size += f", {active:,} active"
        rows.append([name, size, values])
    return rows


def _fields(spec: ModelSpec) -> list[list[str]]:
    """Return a header and a row per field, with its default."""
    header = ["field", "default"]
    cls, *others = {type(flavor) for flavor in spec.flavors.values()}
    if others:  # contents of config.json
        return [header, ["any key of the class's config.json", "as in the class"]]
    return [header, *map(list, _defaults(cls))]


def _set_fields(flavor: Any) -> Iterator[tuple[str, str]]:
    """Yield the dotted fields of a flavor that differ from their defaults, and their values."""
    for field in dataclasses.fields(flavor):
        value = getattr(flavor, field.name)
        if value == field.default:
            continue
        leaves = dataclasses.asdict(value) if dataclasses.is_dataclass(value) else {"": value}
        for leaf in leaves:
            yield f"{field.name}.{leaf}".rstrip("."), toml_value(leaves[leaf])


def _defaults(cls: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted fields of a flavor's class and their defaults, including those of nested
    classes.
    """
    types = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        default = "required"
        if field.default is not dataclasses.MISSING:
            default = toml_value(field.default)
        yield f"{path}{field.name}", default
        for kind in (types[field.name], *get_args(types[field.name])):
            if dataclasses.is_dataclass(kind):
                yield from _defaults(kind, f"{path}{field.name}.")
