"""Cut a token source into windows: the stream every seq_len tokens, or packed documents.

A window has rows of seq_len numbers: tokens, labels (the next tokens, or IGNORED), and under a
document mask also the number of each token's document and its position in it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from titanlite.data.packing_plan import open_plan
from titanlite.data.sources import Source, require_ends
from titanlite.errors import UserError

TOKENS, LABELS, DOCUMENTS, POSITIONS = range(4)
"""The rows of a window."""
IGNORED = -100
"""The label of a position that does not count in the loss."""


class Concatenated:
    """The stream, cut every seq_len tokens; documents continue in the next window."""

    def __init__(self, source: Source, seq_len: int, masked: bool, key: str) -> None:
        self._source = source
        self._seq_len = seq_len
        self.samples = (source.tokens - 1) // seq_len
        if self.samples < 1:
            raise UserError(
                f"{key}: the data in {source.folder} has {source.tokens} tokens, and a window "
                f"needs {seq_len + 1} ({key}.seq_len + 1)"
            )
        if masked:
            require_ends(source, key)

    def fill(self, out: np.ndarray, number: int) -> None:
        """Write window `number` into `out`, of two rows, or four under a document mask."""
        start = number * self._seq_len
        ids = self._source.read(start, self._seq_len + 1)
        fill_window(out, ids, partial(self._source.is_end, start))


class Packed:
    """Whole documents in each window, and padding; documents longer than seq_len are cut."""

    def __init__(self, source: Source, seq_len: int, key: str) -> None:
        require_ends(source, key)
        self._source = source
        self._seq_len = seq_len
        self._key = key
        self._plan = open_plan(source, seq_len)
        self.samples = self._plan.windows
        if not self.samples:
            raise UserError(f"{key}: no document has two tokens or more")

    def __reduce__(self) -> tuple[Any, ...]:  # a worker process maps the plan again
        return Packed, (self._source, self._seq_len, self._key)

    def fill(self, out: np.ndarray, number: int) -> None:
        """Write window `number` into `out`, of two rows, or four under a document mask."""
        blank(out)
        begin = 0
        for document, (start, length) in enumerate(self._plan.pieces(number)):
            ids = self._source.read(start, length + 1)
            span = slice(begin, begin + length)
            out[TOKENS, span] = ids[:-1]
            out[LABELS, span] = ids[1:]
            out[DOCUMENTS:POSITIONS, span] = document  # no row without a document mask
            begin += length
        if len(out) == 4:
            out[POSITIONS] = _positions(out[DOCUMENTS])


def blank(out: np.ndarray) -> None:
    """Fill a window with padding."""
    out[:] = 0
    out[LABELS] = IGNORED
    out[DOCUMENTS:POSITIONS] = -1  # no row without a document mask


def fill_window(
    out: np.ndarray, ids: np.ndarray, find_ended: Callable[[np.ndarray], np.ndarray]
) -> None:
    """Write `ids`, the tokens of a window and the next one, into `out`; if there are fewer, pad.

    `find_ended` returns which of the tokens are the last of a document.
    """
    tokens = ids[:-1]
    labels = ids[1:]
    length = len(tokens)
    if length < out.shape[1]:
        blank(out)
    if len(out) == 2:  # the usual case, five times as fast
        out[TOKENS, :length] = tokens
        out[LABELS, :length] = labels
        return
    ended = find_ended(tokens)
    documents = np.cumsum(ended) - ended
    # The token after an end belongs to another document.
    labels = np.where(ended, IGNORED, labels.astype(np.int64))
    out[:, :length] = tokens, labels, documents, _positions(documents)


def _positions(documents: np.ndarray) -> np.ndarray:
    """Return 0, 1, 2, … counted from the first token of each document."""
    index = np.arange(len(documents))
    begins = np.concatenate([[True], documents[1:] != documents[:-1]])
    return index - np.maximum.accumulate(np.where(begins, index, 0))
