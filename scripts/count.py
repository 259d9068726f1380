"""Print the lines of the reading core and of every room: python scripts/count.py. Only the standard library is used.

The core is what a reader must know to trust a training step; its files are listed in CONTRIBUTING.md.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def source_files() -> list[Path]:
    """Return every Python file of titanlite/ and models/, relative to the root."""
    files = [*(ROOT / "titanlite").rglob("*.py"), *(ROOT / "models").rglob("*.py")]  # rglob follows no links
    return sorted({path.resolve().relative_to(ROOT) for path in files})


def core_files() -> list[Path]:
    """Return the files of the reading core: the paths in CONTRIBUTING.md's block, less those after a minus sign."""
    block = re.search(r"```reading-core\n(.+?)```", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.DOTALL)
    assert block, "CONTRIBUTING.md has a block ```reading-core"
    files: list[Path] = []
    for line in block[1].split("\n"):
        for pattern in line.split():
            excluded = pattern.removeprefix("-")
            matching = [path for path in source_files() if f"{path}".startswith(excluded)]
            assert matching, f"{pattern} in CONTRIBUTING.md's reading core matches no file"
            files = [f for f in files if f not in matching] if excluded != pattern else [*files, *matching]
    return files


def lines(path: Path) -> int:
    return len((ROOT / path).read_text(encoding="utf-8").splitlines())


def room(path: Path) -> str:
    """Return the folder that a file counts for: titanlite/ROOM, models/MODEL or, for a loose file, titanlite."""
    return "/".join(path.parts[:2]) if len(path.parts) > 2 else path.parts[0]


def main() -> None:
    core = set(core_files())
    in_core = Counter[str]()
    beside = Counter[str]()
    for path in source_files():
        (in_core if path in core else beside)[room(path)] += lines(path)
    for title, counts in (("reading core", in_core), ("other files", beside)):
        print(f"{title:<24} {counts.total():>7,}")
        for name, count in sorted(counts.items()):
            print(f"  {name:<22} {count:>7,}")
    whole = sum(lines(path) for path in source_files() if path.parts[0] == "titanlite")
    print(f"{'titanlite/ as a whole':<24} {whole:>7,}")


if __name__ == "__main__":
    main()
