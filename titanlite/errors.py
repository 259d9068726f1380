"""Exit codes, errors that a user can cause, which need no traceback, and the formatting that
messages share.
"""

import difflib
import errno
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

OK, FAILED, REFUSED, STOPPED, CUT_SHORT, GIVEN_UP, INTERRUPTED = 0, 1, 2, 75, 76, 77, 130
"""Exit codes: done; failed; the config or the machine can't; stopped on request, with its last step
saved or with some steps lost; the budget of restarts or skips is used up; Ctrl-C."""

PAGE = 110
"""Columns of a page of help that goes to no terminal."""


class UserError(Exception):
    """A request that can't be carried out; the message names the key, file or tensor, the value,
    and the remedy.
    """

    code = REFUSED

    def __init__(self, why: str = "", key: str = "", value: str | None = None) -> None:
        """Take the key and its value where readers need them apart; elsewhere the message has
        them.
        """
        super().__init__(why)
        self.why, self.key, self.value = why, key, value

    def __str__(self) -> str:
        if not self.key:
            return self.why
        title = self.key if self.value is None else f'{self.key} = "{self.value}"'
        return f"{title} {self.why}" if self.why.startswith("is ") else f"{title}: {self.why}"


class RunFailed(UserError):
    """A run that had started cannot continue: its data ended, a save failed, a loss was not
    finite.
    """

    code = FAILED


class GivenUp(RunFailed):
    """A budget of [fault] is used up: another start would not help."""

    code = GIVEN_UP


def remedy(error: OSError) -> str:
    """Return what to do where no file more can be opened."""
    return "; raise the limit of open files (ulimit -n)" if error.errno == errno.EMFILE else ""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the word of `known` closest to `word` in any case, or an empty string if none is
    close.
    """
    by_lower_case = {each.lower(): each for each in known}
    close = difflib.get_close_matches(word.lower(), by_lower_case, n=1, cutoff=0.6)
    return by_lower_case[close[0]] if close else ""


def install_command(*packages: str) -> str:
    """Return the command that installs packages into this environment; uv makes environments
    without pip.
    """
    python, names = shlex.quote(sys.executable), shlex.join(packages)
    # util.find_spec("pip") would hide setuptools' distutils, without which inductor fails
    has_pip = PathFinder.find_spec("pip")
    if not has_pip and shutil.which("uv"):
        return f"uv pip install --python {python} {names}"
    first = "" if has_pip else f"{python} -m ensurepip && "
    return f"{first}{python} -m pip install {names}"


def command_line(command: str, *words: str) -> str:
    """Return how to type a command of this environment, quoted for a shell."""
    own = Path(sys.executable).with_name(command)
    return shlex.join(
        [str(own) if own.exists() and shutil.which(command) != str(own) else command, *words]
    )


def replace_unprintable() -> None:
    """Print a question mark for what the terminal's encoding lacks, instead of ending in an
    error.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[attr-defined]


def print_notice(text: str) -> None:
    """Print a line for people, apart from a command's output."""
    print(f"titanlite: {text}", file=sys.stderr, flush=True)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def some_of(lines: Sequence[str], most: int = 8) -> str:
    """Return lines indented below a heading: the first `most`, then the number of the rest."""
    more = [f"and {len(lines) - most} more"] if len(lines) > most else []
    return "".join(f"\n  {line}" for line in [*lines[:most], *more])


def counted(number: int, noun: str) -> str:
    """Return such as "1 rank" or "8 ranks"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def few_of(numbers: Sequence[int]) -> str:
    """Return numbers in a line: the first eight, then how many more."""
    text = ", ".join(map(str, numbers[:8]))
    return f"{text} and {len(numbers) - 8} more" if len(numbers) > 8 else text


def format_bytes(size: float) -> str:
    """Return a number of bytes in the largest unit that gives at least 1."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.0f} B" if units[0] == "B" else f"{size:.1f} {units[0]}"


def columns(piped: int = 1_000_000) -> int:
    """Return the width of the terminal, or of pages that go elsewhere."""
    return shutil.get_terminal_size((piped, 24)).columns


def format_table(
    rows: Iterable[Sequence[str]], header: Sequence[str] = (), align: str = "", indent: int = 0
) -> str:
    """Return rows as aligned columns two spaces apart; `align` has "<" or ">" per column, "<" where
    it ends.

    Text in the last column takes several lines where the terminal is narrow.
    """
    lines = [*([header] if header else []), *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    room = columns() - indent - sum(width + 2 for width in widths[:-1])
    if widths and 16 <= room < widths[-1] and align[len(widths) - 1 :] != ">":
        lines = [
            (*(first if number == 0 else [""] * len(first)), part)
            for *first, last in lines
            for number, part in enumerate(textwrap.wrap(last, room, break_on_hyphens=False) or [""])
        ]
        widths[-1] = room
    formats = [
        f"{side}{width}" for width, side in zip(widths, align.ljust(len(widths), "<"), strict=False)
    ]
    return "\n".join(
        " " * indent + "  ".join(map(format, line, formats)).rstrip() for line in lines
    )
