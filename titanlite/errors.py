"""Errors that a user can cause: they say what is wrong and what would be right, and need no traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class UserError(Exception):
    """What was asked for can't be done; the message names the key, file or tensor, the value, and the remedy."""


class RunFailed(UserError):
    """A run that had started cannot continue: its data ended, a save failed, a loss was not finite."""


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word closest to `word`, or an empty string where none is close."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)), "")


def first_line(error: BaseException) -> str:
    """What an error says, or its kind where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def some_of(lines: Sequence[str], most: int = 8) -> str:
    """Indented lines, not all of them where there are many."""
    more = [f"and {len(lines) - most} more"] if len(lines) > most else []
    return "".join(f"\n  {line}" for line in [*lines[:most], *more])


def format_bytes(size: float) -> str:
    """Bytes in the unit that a person would use."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.0f} B" if units[0] == "B" else f"{size:.1f} {units[0]}"
