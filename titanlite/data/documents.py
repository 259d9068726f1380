"""Find the files of a text data set, and read their documents in pieces that many processes can share.

A `.txt` (or `.py`) file is one document; a `.jsonl` file has one per line, in "text"; a `.parquet` file one per row,
in the column "text". This module imports no torch.
"""

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
SEGMENT_BYTES = 1 << 20
"""A longer text is tokenized in segments cut at line ends: a tokenizer needs a hundred times a text's size."""


@dataclass(frozen=True)
class Documents:
    """Files in a fixed order, by names that are the same on every machine."""

    root: Path
    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def are_plain(self) -> bool:
        """Whether every file is one document as it is."""
        return not any(name.endswith((".jsonl", ".parquet")) for name in self.names)

    def fingerprint(self, tokenizer: str) -> str:
        """Hash the files' names and sizes and the tokenizer's fingerprint."""
        return _hash_lines([tokenizer, *(f"{n}:{s}" for n, s in zip(self.names, self.sizes, strict=True))])

    def state(self) -> str:
        """Hash the folder and the files' names, sizes and modification times: the key of what is cached locally."""
        times = [(self.root / name).stat().st_mtime_ns for name in self.names]
        return _hash_lines([str(self.root.resolve()), *map(str, zip(self.names, self.sizes, times, strict=True))])


def _hash_lines(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


@cache
def standard_library(held_out: bool) -> Documents:
    """Find the running interpreter's modules, without tests and installed packages; every 25th file is held out."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in skipped]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    ordered = sorted(files, key=lambda file: file.relative_to(root).as_posix())
    return _sorted_documents(root, [f for i, f in enumerate(ordered) if (i % HELD_OUT_EVERY == 0) == held_out])


def text_files(origin: str, path: str) -> Documents:
    """Find a text file, or all below a folder; `origin` is the config key or argument to name in an error."""
    root = Path(path)
    if root.is_file():
        if root.suffix not in SUFFIXES:
            raise UserError(f"{origin}: {path} is not one of {', '.join(SUFFIXES)}")
        documents = _sorted_documents(root.parent, [root])
    elif root.is_dir():
        files = [p for p in root.rglob("*") if p.suffix in SUFFIXES and p.is_file()]
        visible = [p for p in files if not any(part.startswith(".") for part in p.relative_to(root).parts)]
        documents = _sorted_documents(root, visible)
    else:
        raise UserError(f"{origin}: there is no such folder or file")
    if not sum(documents.sizes):
        raise UserError(f"{origin}: no text there (looked for {', '.join(SUFFIXES)} files)")
    return documents


def _sorted_documents(root: Path, files: list[Path]) -> Documents:
    ordered = sorted((file.relative_to(root).as_posix(), file) for file in files)
    return Documents(root, tuple(name for name, _ in ordered), tuple(file.stat().st_size for _, file in ordered))


@dataclass(frozen=True)
class Segment:
    """A document, or a part of a long one."""

    text: str
    ends: bool  # whether the document ends with this segment


@dataclass(frozen=True)
class Piece:
    """A part of a file: the lines that begin in a range of bytes, or row groups of a parquet file."""

    name: str
    start: int
    stop: int
    size: int  # bytes, for the progress bar
    last: bool  # whether the file ends with this piece


def pieces(documents: Documents, limit: int) -> Iterator[Piece]:
    """Yield all documents in order, in pieces of about `limit` bytes."""
    for name, size in zip(documents.names, documents.sizes, strict=True):
        if name.endswith(".parquet"):
            metadata = _open_parquet(documents.root / name).metadata
            for group in range(metadata.num_row_groups):
                group_bytes = metadata.row_group(group).total_byte_size
                yield Piece(name, group, group + 1, group_bytes, group + 1 == metadata.num_row_groups)
            continue
        for start in range(0, max(size, 1), limit):
            yield Piece(name, start, min(start + limit, size), min(limit, size - start), start + limit >= size)


def segments(root: Path, piece: Piece) -> Iterator[Segment]:
    """Yield the documents of a piece."""
    path = root / piece.name
    if path.suffix == ".parquet":
        table = _open_parquet(path)
        if "text" not in table.schema_arrow.names:
            raise UserError(f'{path} has no column "text"; it has: {", ".join(table.schema_arrow.names)}')
        for text in table.read_row_group(piece.start, columns=["text"])["text"].to_pylist():
            yield Segment(text or "", True)
    elif path.suffix == ".jsonl":
        for offset, line in _lines(path, piece):
            if not line.isspace():
                yield Segment(_json_text(path, offset, line), True)
    else:
        lines: list[bytes] = []
        size = 0
        for _, line in _lines(path, piece):
            lines.append(line)
            size += len(line)
            if size >= SEGMENT_BYTES:
                yield Segment(b"".join(lines).decode("utf-8", errors="replace"), False)
                lines, size = [], 0
        if lines or piece.last:
            yield Segment(b"".join(lines).decode("utf-8", errors="replace"), piece.last)


def _lines(path: Path, piece: Piece) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that begin in the piece, each with the byte where it begins."""
    with path.open("rb") as file:
        if piece.start:
            file.seek(piece.start - 1)
            file.readline()  # the end of a line that began in the piece before
        while (offset := file.tell()) < piece.stop and (line := file.readline()):
            yield offset, line


def _json_text(path: Path, offset: int, line: bytes) -> str:
    try:
        return json.loads(line)["text"]
    except (ValueError, KeyError, TypeError) as error:
        reason = 'no "text" in it' if isinstance(error, KeyError) else f"not a JSON object: {error}"
        raise UserError(f"{path}: the line at byte {offset}: {reason}") from None


def _open_parquet(path: Path) -> Any:
    try:
        import pyarrow.parquet  # type: ignore[import-not-found]
    except ImportError:
        raise UserError(f"{path}: reading parquet needs pyarrow: pip install 'titanlite[hf]'") from None
    return pyarrow.parquet.ParquetFile(path)
