"""Megatron's index next to a `.bin` of token ids, with their type and where documents end."""

import struct
from functools import lru_cache
from pathlib import Path

import numpy as np

from titanlite.errors import UserError

_MAGIC = b"MMIDIDX\0\0"
_BEGIN = 34
"""Bytes before the lengths: magic, version, type, and the counts of sequences and bounds."""
_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def index_of(path: Path) -> Path | None:
    """Return the index next to a file of ids, or None."""
    index = path.with_suffix(".idx")
    return index if index.is_file() else None


@lru_cache(16)
def read_index(path: Path, size: int) -> tuple[np.dtype, np.ndarray]:
    """Return the type of the ids in a file of `size` bytes, and the position after each document.

    The index determines where documents end; there may be no end tokens.
    """
    content = np.fromfile(path, dtype=np.uint8)
    head = content[:_BEGIN].tobytes()
    if not head.startswith(_MAGIC) or len(head) < _BEGIN:
        raise UserError(f"{path} is not an index of Megatron")
    version, code, sequences, bounds = struct.unpack("<QBQQ", head[len(_MAGIC) :])
    if version != 1 or code not in _TYPES:
        raise UserError(f"{path}: version {version} with type {code}; legal: 1 with {[*_TYPES]}")
    dtype = np.dtype(_TYPES[code])
    if len(content) != _BEGIN + 12 * sequences + 8 * bounds:
        raise UserError(f"{path} is truncated, or multimodal: only text can be read")
    lengths = np.frombuffer(content, "<i4", sequences, _BEGIN)
    starts = np.frombuffer(content, "<i8", sequences, _BEGIN + 4 * sequences)
    documents = np.frombuffer(content, "<i8", bounds, _BEGIN + 12 * sequences)
    stops = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    in_order = np.array_equal(starts, stops[:-1] * dtype.itemsize) and not (lengths < 0).any()
    if not in_order:
        raise UserError(f"{path} is damaged, or its sequences are not in the order of the file")
    bounds_are_right = documents[:1].tolist() == [0] and documents[-1:].tolist() == [sequences]
    if not bounds_are_right or (np.diff(documents) < 0).any():
        raise UserError(
            f"{path} is damaged: its documents should begin at sequence 0, end at {sequences} and "
            "follow each other"
        )
    if stops[-1] * dtype.itemsize != size:
        raise UserError(f"{path} has {stops[-1]} ids of {dtype}, but the .bin has {size} bytes")
    ends = np.unique(stops[documents])
    return dtype, ends[ends > 0]  # empty documents have no end
