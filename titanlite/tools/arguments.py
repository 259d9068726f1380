"""The words behind a verb: options with a value each, flags, and the rest; and numbers in words."""

from __future__ import annotations

import sys
from collections.abc import Callable

from titanlite.errors import UserError, nearest


def run_verb(verb: Callable[[], int], stopped: str = "stopped") -> int:
    """The exit code of a verb; a user's mistake is one line, and Ctrl-C another."""
    try:
        return verb()
    except UserError as error:
        print(f"titanlite: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\ntitanlite: {stopped}", file=sys.stderr)
        return 130


def run_resumable(verb: Callable[[], int]) -> int:
    """The exit code of a verb that goes on where it stopped."""
    return run_verb(verb, "stopped; the same command goes on from here")


def split_flags(words: list[str], flags: tuple[str, ...]) -> tuple[list[str], set[str]]:
    """The other words, and which of the flags, which have no value, are among them."""
    return [word for word in words if word not in flags], set(flags).intersection(words)


def split_options(verb: str, words: list[str], options: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """The words that are no option, and the options' values, by default those of `options`."""
    values, others = dict(options), []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if not word.startswith("-"):
            others.append(word)
        elif name not in options:
            close = nearest(name, options)
            hint = f"did you mean {close}?" if close else f"there are: {', '.join(options)}"
            raise UserError(f"{verb} has no option {name}; {hint}")
        elif not equals and not rest:
            raise UserError(f"{name} needs a value; `titanlite {verb} --help` shows which")
        else:
            values[name] = value if equals else rest.pop(0)
    return others, values
