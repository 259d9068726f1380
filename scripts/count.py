"""Count titanlite's tokens, with the standard library only.

    python scripts/count.py

Prints the tokens of every ring and room, and of the tests. Tokens are those of Python's lexer
without comments, docstrings, line ends and indentation. An f-string counts as one, as it did before
Python 3.12, so all versions of Python count alike. A ring is a block of files in CONTRIBUTING.md.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAYOUT = {
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.COMMENT,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
F_STRING = {"FSTRING_START": 1, "TSTRING_START": 1, "FSTRING_END": -1, "TSTRING_END": -1}
"""How the tokens of f-strings, from Python 3.12 on, change the nesting depth."""


def source_files() -> list[Path]:
    """Return every Python file of titanlite/ and models/, relative to the root."""
    files = [
        *(ROOT / "titanlite").rglob("*.py"),
        *(ROOT / "models").rglob("*.py"),
    ]  # rglob follows no links
    return sorted({path.resolve().relative_to(ROOT) for path in files})


@cache
def rings() -> dict[int, list[Path]]:
    """Return the files of each ring in reading order.

    A line of a block in CONTRIBUTING.md has a file or a folder and its content. A folder stands for
    the files in it that no other line names.
    """
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = {
        int(n): block.split("\n")
        for n, block in re.findall(r"```ring-(\d)\n(.+?)\n```", text, re.DOTALL)
    }
    patterns = {ring: [line.split()[0] for line in lines] for ring, lines in named.items()}
    files = {
        Path(pattern)
        for lines in patterns.values()
        for pattern in lines
        if not pattern.endswith("/")
    }
    found: dict[int, list[Path]] = {}
    for ring, lines in patterns.items():
        found[ring] = []
        for pattern in lines:
            matching = [Path(pattern)]
            if pattern.endswith("/"):
                matching = [
                    f for f in source_files() if f"{f}".startswith(pattern) and f not in files
                ]
            assert matching and all((ROOT / f).is_file() for f in matching), (
                f"ring {ring}: no file {pattern}"
            )
            found[ring] += matching
    return found


@cache
def tokens(path: Path) -> int:
    """Return the tokens of a file."""
    return tokens_of((ROOT / path).read_text(encoding="utf-8"))


def tokens_of(source: str) -> int:
    """Return the tokens of a source text."""
    count = depth = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        depth += F_STRING.get(tokenize.tok_name[token.type], 0)
        count += depth == 0 and token.type not in LAYOUT
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            count -= isinstance(node.value.value, str)  # a docstring
    return count


def room(path: Path) -> str:
    """Return the folder that a file counts for: titanlite/ROOM, models/MODEL or, for a loose file,
    titanlite.
    """
    return "/".join(path.parts[:2]) if len(path.parts) > 2 else path.parts[0]


def main() -> None:
    print("tokens of code, without comments and docstrings\n")
    for ring, paths in rings().items():
        rooms = Counter[str]()
        for path in paths:
            rooms[room(path)] += tokens(path)
        print(f"{f'ring {ring}, {len(paths)} files':<24} {rooms.total():>8,}")
        for name, count in sorted(rooms.items()):
            print(f"  {name:<22} {count:>8,}")
    whole = sum(tokens(path) for path in source_files() if path.parts[0] == "titanlite")
    tests = sum(tokens(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("*.py"))
    print(f"{'titanlite/ as a whole':<24} {whole:>8,}")
    print(f"{'tests/ as a whole':<24} {tests:>8,}")


if __name__ == "__main__":
    main()
