"""The words behind a verb: options with a value each, and the rest."""

from __future__ import annotations

from titanlite.errors import UserError, nearest


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
