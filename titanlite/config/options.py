"""Options of a command, declared as in its manual. Imports no torch."""

from argparse import Action, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from titanlite.errors import UserError, nearest

Options = Mapping[str, str | tuple[Any, ...]]
"""The meaning of each option by its usage: "--full" is a flag, "--out FILE" takes a value, "--x
steps|hours" one of these, "--hardware FILE …" may be repeated; "FOLDER" is an argument, "[FOLDER]"
an optional one, "FOLDER …" takes several, "[FOLDER …]" also none. The
type, the default, and whether the option is required may follow the meaning."""


A_RUN: Options = {"[DUMP]": ("dump folder of a run (default: outputs)", Path, Path("outputs"))}


def declare(parser: Any, options: Options) -> None:
    """Add options to a parser or a group; the value of `--model.package` becomes the attribute
    `package`.
    """
    for usage, meaning in options.items():
        about, *typed = [meaning] if isinstance(meaning, str) else meaning
        how: dict[str, Any] = dict(
            zip(("type", "default", "required"), typed, strict=False), help=about
        )
        is_optional = usage.startswith("[")
        usage = usage.strip("[]")
        name, _, value = usage.removesuffix(" …").partition(" ")
        is_list = usage.endswith(" …")
        if name.startswith("--"):
            how["dest"] = name.strip("-").rpartition(".")[2].replace("-", "_")
            if is_list:
                how |= {"action": "append", "default": []}
            if "|" in value:
                how["choices"] = value.split("|")
            elif value:
                how["metavar"] = value
            else:
                how["action"] = "store_true"
        else:
            how["metavar"] = name
            if is_list:
                how["nargs"] = "*" if is_optional else "+"
            elif is_optional:
                how["nargs"] = "?"
            name = name.lower()
        parser.add_argument(name, **how)


def declare_commands(
    parser: ArgumentParser,
    commands: Mapping[str, tuple[Callable[..., int], str, str, Options]],
    **how: Any,
) -> Mapping[str, ArgumentParser]:
    """Add sub-commands to a parser and return their parsers. Each has a function that runs it, its
    meaning, an example, and options.
    """
    group = parser.add_subparsers(metavar="|".join(commands), required=True, **how)
    for name, (run, about, example, options) in commands.items():
        command = group.add_parser(
            name, help=about, description=about, epilog=f"example: {parser.prog} {example}"
        )
        command.set_defaults(run=run)
        declare(command, options)
    return group.choices


def positive_int(text: str) -> int:
    """Return a command-line option's whole number >= 1."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"must be a whole number >= 1, not {text!r}")
    return int(text)


class KeysHelp(Action):
    """Print --help with every config key, or only the keys that mention a search word."""

    def __call__(
        self, parser: ArgumentParser, namespace: Namespace, values: Any, option: str | None = None
    ) -> None:
        from titanlite.config.docs import help_text
        from titanlite.config.schema import KEYS

        text = help_text(values)
        if not text:
            close = nearest(values, {part for key in KEYS for part in key.split(".")})
            hint = f"; did you mean '{close}'?" if close else ""
            raise UserError(f"no config key mentions '{values}'{hint}")
        if not values:
            parser.print_help()
            print()
        print(text, end="")
        parser.exit()
