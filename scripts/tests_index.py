"""Find tests: python scripts/tests_index.py [--write | FILE …]. Only the standard library is used.

With files of titanlite/ or models/, prints the tests of each: those of its name and those that
import it, or else those of the files that import it. --write makes tests/README.md, the list of
what each test file promises."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "tests" / "README.md"
HEAD = """# Tests

Written by `python scripts/tests_index.py --write` from the first lines of the test files.

- A promise is in the name of its test and in the first line of the file, below.
- The tests of a source file: `python scripts/tests_index.py titanlite/optim/skip.py`. \
Folders have the names of
  titanlite's rooms; `parity` runs rows of `titanlite verify`, \
`faults` and `multinode` start whole runs.
- Helpers for all: `conftest.py` has the pool of ranks and the two lanes, \
`lanes.py` marks long samples, `jobs.py` has
  small jobs, `runs.py` starts the command as a person does, \
`outside/` has models and converters of users'
  packages.
- `./scripts/test.sh tests/data -k order` runs a selection; \
[CONTRIBUTING.md](../CONTRIBUTING.md) has the rest.
"""


@cache
def test_files() -> list[Path]:
    return sorted(path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py"))


@cache
def syntax_tree(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


def promise(path: Path) -> str:
    """Return the first paragraph of a file's docstring in one line."""
    docstring = ast.get_docstring(syntax_tree(path)) or ""
    return " ".join(docstring.partition("\n\n")[0].split())


def page() -> str:
    """Return tests/README.md."""
    lines: list[str] = [HEAD.rstrip()]
    room = Path()
    for path in test_files():
        if path.parent != room:
            room = path.parent
            title = room.relative_to("tests").as_posix()
            lines += [
                f"\n## {title if title != '.' else 'The repository'}\n",
                "| promise | file |",
                "|---|---|",
            ]
        words = promise(path).replace("|", "\\|")
        lines.append(f"| {words} | [{path.name}]({path.relative_to('tests')}) |")
    return "\n".join(lines) + "\n"


def module_of(path: Path) -> str:
    """Return the dotted name of a source file; models/ is titanlite.models."""
    parts = path.with_suffix("").parts
    parts = parts if parts[0] == "titanlite" else ("titanlite", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports(path: Path) -> Counter[str]:
    """Return how many names a file imports of each module; a module's own name counts too."""
    found = Counter[str]()
    for node in ast.walk(syntax_tree(path)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found[node.module] += len(node.names)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def tests_of(source: Path) -> list[Path]:
    """Return the test files of a source file, the nearest first."""
    room = source.parent.name
    names = (
        {f"test_{source.stem}", f"test_{room}"}
        if source.parts[0] == "models"
        else {f"test_{source.stem}"}
    )
    named = [path for path in test_files() if path.stem in names]
    found = [path for path in named if room in path.parts] or named
    modules = {module_of(source)}
    while not found or modules == {module_of(source)}:
        importing = [
            path for path in test_files() if any(imports(path)[module] for module in modules)
        ]
        importing.sort(
            key=lambda path: (
                room not in path.parts,
                -sum(imports(path)[module] for module in modules),
            )
        )
        found += [path for path in importing if path not in found]
        users = {
            module_of(path)
            for path in source_files()
            if any(imports(path)[module] for module in modules)
        }
        if users <= modules:
            break
        modules |= users
    if found:
        return found
    command = f'"{source.stem.partition("_")[0]}"'  # imported by its name
    return [path for path in test_files() if command in (ROOT / path).read_text(encoding="utf-8")]


@cache
def source_files() -> list[Path]:
    files = [*(ROOT / "titanlite").rglob("*.py"), *(ROOT / "models").rglob("*.py")]
    return sorted({path.resolve().relative_to(ROOT) for path in files})


def main(arguments: list[str]) -> None:
    if arguments == ["--write"]:
        PAGE.write_text(page(), encoding="utf-8")
        return
    for name in arguments:
        print(f"{name}:")
        for path in tests_of(Path(name).resolve().relative_to(ROOT)):
            print(f"  {path}: {promise(path)}")


if __name__ == "__main__":
    main(sys.argv[1:])
