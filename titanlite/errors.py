"""Exit codes, errors that a user can cause (they need no traceback), and formatting shared by
messages.
"""

import difflib
import errno
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

OK = 0
FAILED = 1
REFUSED = 2
STOPPED = 75
CUT_SHORT = 76
GIVEN_UP = 77
INTERRUPTED = 130
"""Exit codes: done; failed; the config or the machine can't; stopped on request, with its last step
saved or with some steps lost; the budget of restarts or skips is used up; Ctrl-C."""

HELP_COLUMNS = 110
"""Columns of help that is not printed to a terminal."""


class UserError(Exception):
    """A request that can't be fulfilled; the message names the key, file or tensor, the value, and
    the remedy.
    """

    code = REFUSED

    def __init__(self, why: str = "", key: str = "", value: str | None = None) -> None:
        """Take the key and its value separately for callers that need them; otherwise they are part
        of the message.
        """
        super().__init__(why)
        self.why = why
        self.key = key
        self.value = value

    def __str__(self) -> str:
        if not self.key:
            return self.why
        title = self.key if self.value is None else f'{self.key} = "{self.value}"'
        if self.why.startswith("is "):
            return f"{title} {self.why}"
        return f"{title}: {self.why}"


class RunFailed(UserError):
    """A run that had started cannot continue: its data ended, a save failed, a loss was not
    finite.
    """

    code = FAILED


class GivenUp(RunFailed):
    """A budget in [fault] is used up; another start would not help."""

    code = GIVEN_UP


def remedy(error: OSError) -> str:
    """Return what to do if no more files can be opened."""
    if error.errno == errno.EMFILE:
        return "; raise the limit of open files (ulimit -n)"
    return ""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the word of `known` closest to `word` in any case, or an empty string if none is
    close.
    """
    by_lower_case = {each.lower(): each for each in known}
    close = difflib.get_close_matches(word.lower(), by_lower_case, n=1, cutoff=0.6)
    return by_lower_case[close[0]] if close else ""


def install_command(*packages: str) -> str:
    """Return the command that installs packages into this environment, which uv may have created
    without pip.
    """
    python = shlex.quote(sys.executable)
    names = shlex.join(packages)
    # util.find_spec("pip") would hide setuptools' distutils, without which inductor fails
    has_pip = PathFinder.find_spec("pip")
    if not has_pip and shutil.which("uv"):
        return f"uv pip install --python {python} {names}"
    first = "" if has_pip else f"{python} -m ensurepip && "
    return f"{first}{python} -m pip install {names}"


def command_line(command: str, *words: str) -> str:
    """Return how to type a command of this environment, quoted for a shell."""
    own = Path(sys.executable).with_name(command)
    if own.exists() and shutil.which(command) != str(own):
        command = str(own)
    return shlex.join([command, *words])


def replace_unprintable() -> None:
    """Print a question mark for characters that the terminal's encoding lacks."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[attr-defined]


def print_notice(text: str) -> None:
    """Print a line for the user to stderr, separate from a command's output."""
    print(f"titanlite: {text}", file=sys.stderr, flush=True)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def some_of(lines: Sequence[str], most: int = 8) -> str:
    """Return lines indented below a heading: the first `most`, then how many more there are."""
    more = []
    if len(lines) > most:
        more = [f"and {len(lines) - most} more"]
    return "".join(f"\n  {line}" for line in [*lines[:most], *more])


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as "1 rank" or "8 ranks"."""
    if number == 1:
        return f"{number:,} {noun}"
    return f"{number:,} {noun}s"


def few_of(items: Sequence[object], most: int = 8, between: str = ", ") -> str:
    """Return items on one line: the first `most`, then how many more there are."""
    text = between.join(map(str, items[:most]))
    if len(items) > most:
        return f"{text} and {len(items) - most} more"
    return text


def format_bytes(size: float) -> str:
    """Return a number of bytes in the largest unit that gives at least 1."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    if units[0] == "B":
        return f"{size:.0f} B"
    return f"{size:.1f} {units[0]}"


def columns(piped: int = 1_000_000) -> int:
    """Return the width of the terminal, or `piped` if output goes elsewhere."""
    return shutil.get_terminal_size((piped, 24)).columns


def counted_rows(rows: Mapping[tuple[str, ...], int]) -> list[tuple[str, ...]]:
    """Return the rows of a table with a last column for those that stand for several, "x 3"."""
    cells = list[tuple[str, ...]]()
    for row, count in rows.items():
        times = ""
        if count > 1:
            times = f"x {count}"
        cells.append((*row, times))
    return cells


def format_table(
    rows: Iterable[Sequence[str]], header: Sequence[str] = (), align: str = "", indent: int = 0
) -> str:
    """Return rows as aligned columns, two spaces apart. `align` has "<" or ">" for each column; "<"
    is the default for the rest.

    In a narrow terminal, the last column is wrapped.
    """
    lines = [*rows]
    if header:
        lines.insert(0, header)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    room = columns() - indent - sum(width + 2 for width in widths[:-1])
    if widths and 16 <= room < widths[-1] and align[len(widths) - 1 :] != ">":
        wrapped = list[Sequence[str]]()
        for *first, last in lines:
            for part in textwrap.wrap(last, room, break_on_hyphens=False) or [""]:
                wrapped.append((*first, part))
                first = [""] * len(first)
        lines = wrapped
        widths[-1] = room
    formats = []
    for width, side in zip(widths, align.ljust(len(widths), "<"), strict=False):
        formats.append(f"{side}{width}")
    return "\n".join(
        " " * indent + "  ".join(map(format, line, formats)).rstrip() for line in lines
    )
