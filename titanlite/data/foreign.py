"""List the token files of other programs in a manifest: `titanlite data prepare --from FORMAT`.

The ids stay where they are; the folder of the manifest gets the positions where documents end.
"""

import gzip
import json
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from titanlite.data.documents import Documents, text_files
from titanlite.data.prepare import with_counts
from titanlite.data.shards import (
    DATA_MANIFEST,
    HEADER_BYTES,
    MAGIC,
    load_numbers,
    read_shard_manifest,
    sample,
    write_ends,
)
from titanlite.errors import UserError, command_line, first_line
from titanlite.runtime.store import LocalPath

_TYPES = {2: "uint16", 4: "uint32", 8: "int64", 1: "uint8"}
"""Types of ids by their size in bytes."""
_SCANNED = 1 << 24
_MEGATRON_BEGIN = 34
"""The bytes before the lengths: magic, version, type, and the counts of sequences and bounds."""
_MEGATRON_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}

TokensAndEnds = tuple[np.memmap, np.ndarray | None]
"""The ids of a file, and the position after each document if another file lists it."""


def _read_megatron(path: Path) -> TokensAndEnds:
    """Documents end where the index says, since an end token is optional there."""
    index = path.with_suffix(".idx")
    content = index.read_bytes()
    head = content[:_MEGATRON_BEGIN].ljust(_MEGATRON_BEGIN, b"\0")
    magic, version, code, sequences, bounds = struct.unpack("<9sQBQQ", head)
    if magic != b"MMIDIDX\0\0" or version != 1 or code not in _MEGATRON_TYPES:
        why = f"its version {version} with type {code} is unknown"
        raise UserError(f"{index} is not a Megatron index, or {why}")
    dtype = np.dtype(_MEGATRON_TYPES[code])
    if len(content) != _MEGATRON_BEGIN + 12 * sequences + 8 * bounds:
        raise UserError(f"{index} is truncated or multimodal: only text can be read")
    lengths = np.frombuffer(content, "<i4", sequences, _MEGATRON_BEGIN)
    starts = np.frombuffer(content, "<i8", sequences, _MEGATRON_BEGIN + 4 * sequences)
    documents = np.frombuffer(content, "<i8", bounds, _MEGATRON_BEGIN + 12 * sequences)
    stops = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    is_sound = (
        np.array_equal(starts, stops[:-1] * dtype.itemsize)
        and (lengths >= 0).all()
        and documents[:1].tolist() == [0]
        and documents[-1:].tolist() == [sequences]
        and (np.diff(documents) >= 0).all()
    )
    if not is_sound:
        why = "is damaged, or its sequences and documents are not in the order of the file"
        raise UserError(f"{index} {why}")
    size = path.stat().st_size
    if stops[-1] * dtype.itemsize != size:
        raise UserError(f"{index} lists {stops[-1]} tokens of {dtype}, the .bin has {size} bytes")
    return np.memmap(path, dtype, "r"), stops[documents]


def _read_olmo(path: Path) -> TokensAndEnds:
    """Take the type of the ids from their number in the table, whose rows begin with a document's
    first position and the one after its last.
    """
    table = path.with_suffix(".csv.gz")
    try:
        with gzip.open(table) as file:
            rows = [line.split(b",", 2)[:2] for line in file]
        starts, ends = np.array(rows or [(0, 0)], dtype=bytes).astype(np.int64).T
    except (EOFError, OSError, ValueError) as error:
        raise UserError(f"{table} is not a table of documents, or is damaged: {error}") from None
    if starts[0] != 0 or (starts[1:] != ends[:-1]).any():
        raise UserError(f"{table}: a document does not begin where the one before it ends")
    size, tokens = path.stat().st_size, int(ends[-1])
    width = size // max(tokens, 1)
    if width not in _TYPES or width * tokens != size:
        raise UserError(f"{table} lists {tokens} tokens, but {path} has {size} bytes")
    return np.memmap(path, _TYPES[width], "r"), ends


def _read_llm_c(path: Path) -> TokensAndEnds:
    first = np.fromfile(path, np.int32, 3).tolist()
    if first[:2] not in ([MAGIC, 1], [MAGIC, 2]):
        why = f"it does not start with {MAGIC} and version 1 or 2; use --from uint16 for bare ids"
        raise UserError(f"{path} is not an llm.c shard: {why}")
    ids = np.memmap(path, _TYPES[2 * first[1]], "r", HEADER_BYTES)
    if [len(ids)] != first[2:]:
        raise UserError(
            f"{path} is damaged: it has {len(ids)} tokens, not the {first[2]} of its header"
        )
    return ids, None


def _read_alone(dtype: str, path: Path) -> TokensAndEnds:
    """Take the type of the ids from numpy's header, if there is one."""
    with path.open("rb") as file:
        if file.read(6) == b"\x93NUMPY":
            return load_numbers(path), None
    return np.memmap(path, dtype, "r"), None


@dataclass(frozen=True)
class Format:
    """The files of ids of a program, and the files next to them that list the ends of documents."""

    read: Callable[[Path], TokensAndEnds]
    suffixes: tuple[str, ...]
    index: tuple[str, ...] = ()


FORMATS = {
    "megatron": Format(_read_megatron, (".bin",), (".idx",)),
    "olmo": Format(_read_olmo, (".npy",), (".csv.gz",)),
    "llm.c": Format(_read_llm_c, (".bin",)),
}
for _name in _TYPES.values():
    FORMATS[_name] = Format(partial(_read_alone, _name), (".npy", ".bin"))


def require_manifest(key: str, path: Path) -> None:
    """Raise a UserError, with the command that would prepare it, if a run cannot read a folder."""
    if not path.exists():
        raise UserError("there is no such folder or file", key, str(path))
    if read_shard_manifest(path):
        return
    why = f'no {DATA_MANIFEST} of titanlite data prepare there; text is dataset = "text"'
    folder = path if path.is_dir() else path.parent
    for kind, known in FORMATS.items():
        sign, *_ = known.index + known.suffixes
        if any(folder.rglob(f"*{sign}")):
            out = f"{path.resolve().name}-listed"
            words = ["data", "prepare", str(path), "--from", kind, "--out", out]
            command = command_line("titanlite", *words)
            why = f"holds {kind} files; a run reads what a {DATA_MANIFEST} lists: {command}"
            break
    raise UserError(why, key, str(path))


def token_files(key: str, path: str, kind: str) -> Documents:
    """Find the files of a format in a folder, or one of them; `key` is what to name in an error."""
    return text_files(key, path, FORMATS[kind].suffixes + FORMATS[kind].index)


def list_tokens(sources: dict[str, Documents], kind: str, end: int, folder: Path) -> dict[str, Any]:
    """Check the sources' files, list them in a manifest in a folder, and return it.

    The token `end` ends documents where no other file lists their ends; -1 means none.
    """
    out = LocalPath(folder)
    if (out / DATA_MANIFEST).exists():
        raise UserError(f"{out} has a {DATA_MANIFEST}; choose another folder or remove it")
    out.make()
    known = FORMATS[kind]
    files = [
        (source, found.root / name)
        for source, found in sources.items()
        for name in found.names
        if name.endswith(known.suffixes) and not name.endswith(".ends.npy")
    ]
    content, shards = 0, list[dict[str, Any]]()
    for number, (source, path) in enumerate(files):
        shard, ends = _list(path, known, end)
        write_ends(out, number, ends)
        sampled = shard["samples"][shard["file"]]
        content = zlib.crc32(sampled.encode() + ends.tobytes(), content)
        shards.append({**shard, "source": source})
    manifest = {
        "state": "",
        "fingerprint": "-".join(found.fingerprint(kind) for found in sources.values()),
        "content": f"{content:08x}",
        "vocab_size": 0,
        "end": -1 if known.index else end,
        "tokenizer": "",
        **with_counts(shards),
    }
    if not manifest["tokens"]:
        raise UserError(f"no tokens in {' and '.join(sources)}")
    (out / DATA_MANIFEST).put(json.dumps(manifest, indent=1).encode())
    return manifest


def _list(path: Path, known: Format, end: int) -> tuple[dict[str, Any], np.ndarray]:
    """Return a manifest's entry for a file of ids, and the position after each document."""
    files = [path, *(path.with_suffix(suffix) for suffix in known.index)]
    try:
        ids, ends = known.read(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {first_line(error)}") from None
    found = np.empty(0, np.int64)
    if ends is not None:
        found = np.unique(ends[ends > 0])  # an empty document has no separate end
    elif end >= 0:
        begins = range(0, len(ids), _SCANNED)
        parts = [np.flatnonzero(ids[at : at + _SCANNED] == end) + at + 1 for at in begins]
        found = np.concatenate([found, *parts])
    shard = {
        "file": str(path.resolve()),
        "tokens": len(ids),
        "documents": len(found),
        "dtype": ids.dtype.str,
        "start": ids.offset,
        "samples": {str(file.resolve()): sample(file) for file in files},
    }
    return shard, found
