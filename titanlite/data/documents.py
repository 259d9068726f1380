"""Find the files of a text data set, and read their documents in pieces that many processes can
share.

A `.txt` (or `.py`) file is one document; a `.jsonl` or `.jsonl.gz` file has one per line, in the
field "text" or another; a `.parquet` file has one per row, in such a column. Imports no torch.
"""

import gzip
import itertools
import json
import os
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from titanlite.config.urls import COPY_FIRST, is_url
from titanlite.data.fingerprint import fingerprint
from titanlite.errors import UserError, first_line, install_command

NAMED_BY = "training.text_key (data prepare: --text-key)"
SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".parquet")
HELD_OUT_EVERY = 25
SEGMENT_BYTES = 1 << 20
"""A longer text is tokenized in segments, since a tokenizer needs a hundred times a text's size."""
_SOLID = r"[^\s\udc80-\udcff]"  # neither white space nor a byte that may be part of it
_CUTS = (
    re.compile(rf"(?<={_SOLID}\n)(?={_SOLID})"),  # between lines: tokens are as in the whole text
    re.compile(rf"(?<={_SOLID})(?= {_SOLID})"),  # before a word
    re.compile(r"(?<=\n)"),
    re.compile(r"(?=[^\udc80-\udcff])"),
)
"""Places to cut a text, in order of preference; bytes that are not UTF-8 are halves of surrogate
pairs.
"""


@dataclass(frozen=True)
class Documents:
    """Files in a fixed order, with names that are the same on every machine."""

    root: Path
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    skipped: tuple[str, ...] = ()
    """Names in the folder that are not read."""
    text_key: str = "text"
    """The field of a line, or the column, that holds the text."""
    suffixes: tuple[str, ...] = SUFFIXES

    @property
    def are_plain(self) -> bool:
        """Whether every file is one document."""
        return not any(name.endswith(SUFFIXES[1:]) for name in self.names)

    @property
    def notice(self) -> str:
        """A line about skipped files, or an empty string."""
        if not self.skipped:
            return ""
        names = ", ".join(self.skipped[:3])
        if len(self.skipped) > 3:
            names += ", …"
        rule = (
            f"only {', '.join(self.suffixes)} files are read, no links to folders, "
            "and no folders without permission"
        )
        return f"{self.root}: {len(self.skipped)} skipped: {names} ({rule})"

    def fingerprint(self, tokenizer: str) -> str:
        """Hash the files' names and sizes, the text's field and the tokenizer's fingerprint."""
        sizes = [f"{n}:{s}" for n, s in zip(self.names, self.sizes, strict=True)]
        return fingerprint("\n".join([tokenizer, self.text_key, *sizes]))

    def state(self) -> str:
        """Hash the folder and the files' names, sizes and modification times, as the key of the
        local cache.
        """
        times = [(self.root / name).stat().st_mtime_ns for name in self.names]
        files = map(str, zip(self.names, self.sizes, times, strict=True))
        return fingerprint("\n".join([str(self.root.resolve()), *files]))


@cache
def standard_library(held_out: bool) -> Documents:
    """Find the running interpreter's modules, without tests and installed packages.

    Every 25th file is held out.
    """
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in skipped]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    chosen = []
    for number, file in enumerate(sorted(files, key=lambda f: f.relative_to(root).as_posix())):
        if (number % HELD_OUT_EVERY == 0) == held_out:
            chosen.append(file)
    return _sorted_documents(root, chosen)


def text_files(key: str, path: str, suffixes: tuple[str, ...] = SUFFIXES) -> Documents:
    """Find a text file, or all below a folder, or those with other suffixes; `key` is what to name
    in an error.
    """
    root = Path(path)
    if is_url(path):
        raise UserError(COPY_FIRST, key, path)
    if root.is_file():
        if not root.name.endswith(suffixes):
            raise UserError(f"the file is not one of {', '.join(suffixes)}", key, path)
        if not root.stat().st_size:
            raise UserError("the file is empty (0 bytes)", key, path)
        documents = _sorted_documents(root.parent, [root])
    elif root.is_dir():
        if _is_closed(root):
            raise UserError("no permission to read this folder", key, path)
        found = [p for p in root.rglob("*") if p.is_file() or p.is_symlink() or _is_closed(p)]
        names = {p.relative_to(root).as_posix() for p in found}
        files = {name for name in names if name.endswith(suffixes) and (root / name).is_file()}
        read, skipped = _chosen(names, files)
        documents = _sorted_documents(root, [root / name for name in read])
        documents = replace(documents, skipped=tuple(skipped), suffixes=suffixes)
    else:
        raise UserError("there is no such folder or file", key, path)
    if not sum(documents.sizes):
        why = f"no data there (looked for {', '.join(suffixes)} files)"
        raise UserError(why, key, path)
    return documents


def _chosen(names: set[str], files: set[str]) -> tuple[list[str], list[str]]:
    """Return which files below a folder are read, and which names are skipped.

    Hidden names are neither. Of a.jsonl and a.jsonl.gz, which have the same text, the first is
    read.
    """
    visible = {name for name in names if not f"/{name}".count("/.")}
    files = visible & files
    read = files - {f"{name}.gz" for name in files}
    return sorted(read), sorted(visible - read)


def require_folder(key: str, path: str) -> None:
    """Raise a UserError if a given folder of a streamed data set does not exist."""
    if path and not os.path.isdir(path):
        raise UserError("there is no such folder", f"{key}.dataset_path", path)


def _is_closed(path: Path) -> bool:
    return path.is_dir() and not os.access(path, os.R_OK | os.X_OK)


def _sorted_documents(root: Path, files: list[Path]) -> Documents:
    ordered = sorted((file.relative_to(root).as_posix(), file) for file in files)
    names = tuple(name for name, _ in ordered)
    sizes = tuple(file.stat().st_size for _, file in ordered)
    return Documents(root, names, sizes)


@dataclass(frozen=True)
class Segment:
    """A document, or a part of a long one."""

    text: str
    ends: bool  # whether the document ends with this segment


@dataclass(frozen=True)
class Piece:
    """A part of a file: the lines of JSON that begin in a range of bytes, the text between the cuts
    nearest to the range's ends, row groups of a parquet file, or an entire .gz.
    """

    name: str
    start: int
    stop: int
    size: int  # bytes, for the progress bar
    last: bool  # whether the file ends with this piece
    text_key: str = "text"


def pieces(documents: Documents, limit: int) -> Iterator[Piece]:
    """Yield all documents in order, in pieces of about `limit` bytes."""
    key = documents.text_key
    for name, size in zip(documents.names, documents.sizes, strict=True):
        if name.endswith(".parquet"):
            table = _open_parquet(documents.root / name)
            require_text(documents.root / name, table.schema_arrow, key)
            metadata = table.metadata
            for group in range(metadata.num_row_groups):
                group_bytes = metadata.row_group(group).total_byte_size
                is_last = group + 1 == metadata.num_row_groups
                yield Piece(name, group, group + 1, group_bytes, is_last, key)
            continue
        step = limit
        if name.endswith(".gz"):
            step = size
        for start in range(0, max(size, 1), max(step, 1)):
            stop = min(start + step, size)
            yield Piece(name, start, stop, stop - start, start + step >= size, key)


def plain_text(value: Any) -> list[str]:
    """Return a document's text, the value of its field; raise if it is not a string of text."""
    value.encode()
    return [value]


def segments(
    root: Path, piece: Piece, texts: Callable[[Any], Iterable[str]] = plain_text
) -> Iterator[Segment]:
    """Yield the documents of a piece; `texts` returns those in the value of a field."""
    path = root / piece.name
    key = piece.text_key
    if path.suffix == ".parquet":
        table = _open_parquet(path)
        try:
            column = table.read_row_group(piece.start, columns=[key])[key].to_pylist()
        except (ValueError, OSError) as error:  # ArrowInvalid is a ValueError
            raise UserError(
                f"{path} is damaged: row group {piece.start}: {first_line(error)}"
            ) from None
        for text in column:
            yield from segments_of(text or "")
    elif path.suffix == ".gz":
        try:
            with gzip.open(path) as file:
                for number, line in enumerate(file, 1):
                    if not line.isspace():
                        where = partial("{}: line {}".format, path, number)
                        yield from _json_segments(where, line, key, texts)
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(f"{path} cannot be read: {first_line(error)}") from None
    elif path.suffix == ".jsonl":
        for offset, line in _lines(path, piece):
            if not line.isspace():
                yield from _json_segments(partial(_line_at, path, offset), line, key, texts)
    else:
        with _open(path) as file:
            yield from _between(file, piece.start, piece.stop, piece.last)


def segments_of(text: str) -> Iterable[Segment]:
    """Return a text as one segment, or a long one in parts."""
    content = text.encode()
    if len(content) <= SEGMENT_BYTES:
        return [Segment(text, True)]
    return _between(BytesIO(content), 0, len(content), last=True)


def _between(file: BinaryIO, start: int, stop: int, last: bool) -> Iterator[Segment]:
    """Yield a text in parts, from the cut near one byte to the cut near another."""
    size = file.seek(0, os.SEEK_END)
    begin = _cut(file, start, size)
    stop = _cut(file, stop, size)
    if begin >= stop and last:
        yield Segment("", True)
    while begin < stop:
        end = min(_cut(file, begin + SEGMENT_BYTES, size), stop)
        file.seek(begin)
        text = file.read(end - begin).decode("utf-8", errors="replace")
        yield Segment(text, last and end == stop)
        begin = end


def _cut(file: BinaryIO, byte: int, size: int) -> int:
    """Return the best place to cut a text within half a segment after a byte."""
    if byte <= 0 or byte >= size:
        return min(byte, size)
    file.seek(byte)
    text = file.read(SEGMENT_BYTES // 2).decode("utf-8", "surrogateescape")
    found = next(filter(None, (cut.search(text) for cut in _CUTS)), None)
    before = text[: found.start() if found else 0]
    return byte + len(before.encode("utf-8", "surrogateescape"))


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None


def _lines(path: Path, piece: Piece) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that begin in the piece, each with its offset."""
    with _open(path) as file:
        if piece.start:
            file.seek(piece.start - 1)
            file.readline()  # the end of a line that began in the previous piece
        while True:
            offset = file.tell()
            line = file.readline() if offset < piece.stop else b""
            if not line:
                return
            yield offset, line


def _json_segments(
    source: Callable[[], str], line: bytes, key: str, texts: Callable[[Any], Iterable[str]]
) -> Iterable[Segment]:
    """Return the segments of a line of JSON; a chat, whose text has marks, is not divided.

    `source` returns the file and line that errors name.
    """
    value: Any = None
    try:
        value = json.loads(line)[key]
        found = texts(value)
        if isinstance(value, str):
            return itertools.chain.from_iterable(map(segments_of, found))
        return [Segment(text, True) for text in found]
    except UserError as error:
        reason = str(error)
    except UnicodeEncodeError as error:
        half = error.object[error.start].encode("ascii", "backslashreplace").decode()
        reason = (
            f'"{key}" has {half}, half of a surrogate pair, which is not a character; '
            "replace it, e.g. with \\ufffd"
        )
    except AttributeError:
        reason = f'"{key}" is {json.dumps(value)[:40]}, not a string'
    except KeyError:
        fields = ", ".join(json.loads(line))
        reason = f'no "{key}" in it but {fields}; {NAMED_BY} names the field'
    except TypeError:
        reason = "not a JSON object"
    except ValueError as error:
        reason = f"not JSON: {error}"
    raise UserError(f"{source()}: {reason}")


def _line_at(path: Path, offset: int) -> str:
    """Return the name of a file and the number of the line at an offset."""
    before = _lines(path, Piece(path.name, 0, offset, offset, last=False))
    return f"{path}: line {sum(1 for _ in before) + 1}"


def require_text(source: object, schema: Any, key: str) -> None:
    """Raise a UserError unless an Arrow schema has this column, with strings."""
    if key not in schema.names:
        has = f"it has: {', '.join(schema.names)}; {NAMED_BY} names the column"
        raise UserError(f'{source} has no column "{key}"; {has}')
    kind = str(schema.field(key).type)
    if not re.match(r"(dictionary<values=)?(large_)?string|null$", kind):
        raise UserError(f'{source}: the column "{key}" holds {kind}, not strings')


def _open_parquet(path: Path) -> Any:
    try:
        import pyarrow.parquet  # type: ignore[import-not-found]
    except ImportError:
        raise UserError(
            f"{path}: reading parquet needs pyarrow: {install_command('pyarrow')}"
        ) from None
    try:
        return pyarrow.parquet.ParquetFile(path.open("rb"))  # a name may not be UTF-8
    except (ValueError, OSError) as error:  # ArrowInvalid is a ValueError
        raise UserError(f"{path} is not a parquet file, or damaged: {first_line(error)}") from None
