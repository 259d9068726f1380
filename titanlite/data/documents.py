"""Documents of text: which files a data set has, and their texts in pieces that many processes can share.

A `.txt` (or `.py`) file is one document; a `.jsonl` file has one per line, in "text"; a `.parquet` file one per row,
in the column "text". No torch is imported here.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from titanlite.errors import UserError

SUFFIXES = (".txt", ".jsonl", ".parquet")
HELD_OUT_EVERY = 25


@dataclass(frozen=True)
class Documents:
    """Files in a fixed order, by names that are the same on every machine."""

    root: Path
    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def are_plain(self) -> bool:
        """Whether every file is one document as it stands."""
        return not any(name.endswith((".jsonl", ".parquet")) for name in self.names)

    def fingerprint(self, tokenizer: str) -> str:
        """Changes when a file is added, removed, renamed or resized, or the tokenizer is another."""
        parts = [tokenizer, *(f"{n}:{s}" for n, s in zip(self.names, self.sizes, strict=True))]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

    def state(self) -> str:
        """Changes when a file is written again as well, and with the folder: for what is kept beside the data."""
        times = [(self.root / name).stat().st_mtime_ns for name in self.names]
        parts = [str(self.root.resolve()), *map(str, zip(self.names, self.sizes, times, strict=True))]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


@cache
def standard_library(held_out: bool) -> Documents:
    """The running interpreter's own modules, without tests and installed packages; every 25th is held out."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in skipped]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    found = _listed(root, files)
    chosen = [i for i in range(len(found.names)) if (i % HELD_OUT_EVERY == 0) == held_out]
    return Documents(root, tuple(found.names[i] for i in chosen), tuple(found.sizes[i] for i in chosen))


def text_files(what: str, path: str) -> Documents:
    """A file of text, or all below a folder; `what` names the key or argument that asked."""
    root = Path(path)
    if root.is_file():
        if root.suffix not in SUFFIXES:
            raise UserError(f"{what}: {path} is none of {', '.join(SUFFIXES)}")
        found = _listed(root.parent, [root])
    elif root.is_dir():
        hidden = [p for p in root.rglob("*") if p.suffix in SUFFIXES and p.is_file()]
        found = _listed(root, [p for p in hidden if not any(n.startswith(".") for n in p.relative_to(root).parts)])
    else:
        raise UserError(f"{what}: there is no such folder or file")
    if not sum(found.sizes):
        raise UserError(f"{what}: no text there (looked for {', '.join(SUFFIXES)} files)")
    return found


def _listed(root: Path, files: list[Path]) -> Documents:
    ordered = sorted((file.relative_to(root).as_posix(), file) for file in files)
    return Documents(root, tuple(name for name, _ in ordered), tuple(file.stat().st_size for _, file in ordered))


SEGMENT_BYTES = 1 << 20
"""A longer text is tokenized in segments cut at line ends: a tokenizer takes a hundred times a text's size."""


@dataclass(frozen=True)
class Segment:
    """A document, or a part of a long one."""

    text: str
    ends: bool
    """The document ends with it."""


@dataclass(frozen=True)
class Piece:
    """Part of a file: lines that begin between two bytes, or row groups of a parquet file."""

    name: str
    start: int
    stop: int
    size: int
    """Bytes, for the progress bar."""
    last: bool
    """The file ends with it."""


def pieces(documents: Documents, limit: int) -> Iterator[Piece]:
    """All documents in order, in pieces of about `limit` bytes."""
    for name, size in zip(documents.names, documents.sizes, strict=True):
        if name.endswith(".parquet"):
            groups = _parquet(documents.root / name).metadata
            for group in range(groups.num_row_groups):
                bytes_in_group = groups.row_group(group).total_byte_size
                yield Piece(name, group, group + 1, bytes_in_group, group + 1 == groups.num_row_groups)
            continue
        for start in range(0, max(size, 1), limit):
            yield Piece(name, start, min(start + limit, size), min(limit, size - start), start + limit >= size)


def segments(root: Path, piece: Piece) -> Iterator[Segment]:
    """The documents of a piece."""
    path = root / piece.name
    if path.suffix == ".parquet":
        table = _parquet(path)
        if "text" not in table.schema_arrow.names:
            raise UserError(f'{path} has no column "text"; it has: {", ".join(table.schema_arrow.names)}')
        for text in table.read_row_group(piece.start, columns=["text"])["text"].to_pylist():
            yield Segment(text or "", True)
    elif path.suffix == ".jsonl":
        for offset, line in _lines(path, piece):
            if not line.isspace():
                yield Segment(_text_of(path, offset, line), True)
    else:
        held: list[bytes] = []
        size = 0
        for _, line in _lines(path, piece):
            held.append(line)
            size += len(line)
            if size >= SEGMENT_BYTES:
                yield Segment(b"".join(held).decode("utf-8", errors="replace"), False)
                held, size = [], 0
        if held or piece.last:
            yield Segment(b"".join(held).decode("utf-8", errors="replace"), piece.last)


def _lines(path: Path, piece: Piece) -> Iterator[tuple[int, bytes]]:
    """Lines that begin in the piece, with the byte they begin at."""
    with path.open("rb") as file:
        if piece.start:
            file.seek(piece.start - 1)
            file.readline()  # the rest of a line that began before
        while (offset := file.tell()) < piece.stop and (line := file.readline()):
            yield offset, line


def _text_of(path: Path, offset: int, line: bytes) -> str:
    try:
        return json.loads(line)["text"]
    except (ValueError, KeyError, TypeError) as error:
        why = 'no "text" in it' if isinstance(error, KeyError) else f"not a JSON object: {error}"
        raise UserError(f"{path}: the line at byte {offset}: {why}") from None


def _parquet(path: Path) -> Any:
    try:
        import pyarrow.parquet  # type: ignore[import-not-found]
    except ImportError:
        raise UserError(f"{path}: reading parquet needs pyarrow: pip install 'titanlite[hf]'") from None
    return pyarrow.parquet.ParquetFile(path)
