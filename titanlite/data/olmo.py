"""OLMo's table next to a file of token ids, with the ends of documents."""

import gzip
from functools import lru_cache
from pathlib import Path

import numpy as np

from titanlite.errors import UserError


def table_of(path: Path) -> Path | None:
    """Return the table next to a file of ids, or None."""
    table = path.with_suffix(".csv.gz")
    return table if table.is_file() else None


@lru_cache(16)
def read_table(path: Path, tokens: int) -> np.ndarray:
    """Return the position after each document in a file with this many tokens.

    A row begins with a document's first position and the position after its last.
    """
    try:
        with gzip.open(path) as file:
            rows = [line.split(b",", 2)[:2] for line in file]
        starts, ends = np.array(rows or [(0, 0)], dtype=bytes).astype(np.int64).T
    except (EOFError, OSError, ValueError) as error:
        raise UserError(f"{path} is not a table of documents, or damaged: {error}") from None
    if starts[0] != 0 or (starts[1:] != ends[:-1]).any():
        raise UserError(f"{path}: a document does not begin where the one before it ends")
    if ends[-1] != tokens:
        raise UserError(
            f"{path} has {ends[-1]} ids, but its file has {tokens} of the type that is read; "
            "training.dataloader.token_dtype names another one"
        )
    ends = np.unique(ends)
    return ends[ends > 0]  # empty documents have no end
