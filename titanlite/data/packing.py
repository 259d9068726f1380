"""Cut a token source into windows: the stream every seq_len tokens, or packed documents.

A window has rows of seq_len numbers: tokens, labels (the next tokens, or IGNORED), and under a
document mask also the number of each token's document and its position in it.
"""

import numpy as np

from titanlite.data.fingerprint import fingerprint
from titanlite.data.prepare import cached_arrays
from titanlite.data.sources import Source
from titanlite.errors import UserError

TOKENS, LABELS, DOCUMENTS, POSITIONS = range(4)
"""The rows of a window."""
IGNORED = -100
"""The label of a position that does not count in the loss."""
OPEN_WINDOWS = 1024
"""First-fit closes the oldest window beyond these, which bounds time and memory."""


class Concatenated:
    """The stream cut every seq_len tokens, without padding; documents go on in the next window."""

    def __init__(self, source: Source, seq_len: int, masked: bool, key: str) -> None:
        self._source = source
        self._seq_len = seq_len
        self.samples = (source.tokens - 1) // seq_len
        if self.samples < 1:
            raise UserError(
                f"{key}: dataset too small: {source.tokens} tokens, need at least {seq_len + 1}"
            )
        if masked:
            require_ends(source, key)

    def fill(self, out: np.ndarray, number: int) -> None:
        """Write window `number` into `out`, of two rows, or four under a document mask."""
        ids = self._source.read(number * self._seq_len, self._seq_len + 1)
        fill(out, ids, self._source.end)


class Packed:
    """Whole documents in each window, the rest padding; a document longer than seq_len is cut."""

    def __init__(self, source: Source, seq_len: int, key: str) -> None:
        self._source = source
        self._seq_len = seq_len
        require_ends(source, key)
        identity = f"{source.fingerprint} {source.state} {source.end} {seq_len} {OPEN_WINDOWS}"
        self._starts, self._lengths, self._stops = cached_arrays(
            source.folder,
            f"packed-{fingerprint(identity)}.npz",
            lambda: _plan(source.document_ends(), seq_len),
        )
        self.samples = len(self._stops)
        if not self.samples:
            raise UserError(f"{key}: no document has two tokens or more")

    def fill(self, out: np.ndarray, number: int) -> None:
        """Write window `number` into `out`, of two rows, or four under a document mask."""
        blank(out)
        start = 0
        first = int(self._stops[number - 1]) if number else 0
        stop = int(self._stops[number])
        for document, piece in enumerate(range(first, stop)):
            length = int(self._lengths[piece])
            ids = self._source.read(int(self._starts[piece]), length + 1)
            span = slice(start, start + length)
            out[TOKENS, span] = ids[:-1]
            out[LABELS, span] = ids[1:]
            out[DOCUMENTS:POSITIONS, span] = document  # no row without a document mask
            start += length
        if len(out) == 4:
            out[POSITIONS] = _positions(out[DOCUMENTS])


def _plan(ends: np.ndarray, seq_len: int) -> list[np.ndarray]:
    """Return the pieces' starts and lengths by window, and the pieces up to each window's end."""
    starts, lengths = cut_documents(ends, seq_len)
    order, stops = first_fit(lengths, seq_len)
    return [starts[order], lengths[order], stops]


WindowSource = Concatenated | Packed


def blank(out: np.ndarray) -> None:
    """Fill a window with padding."""
    out[:] = 0
    out[LABELS] = IGNORED
    out[DOCUMENTS:POSITIONS] = -1  # no row without a document mask


def fill(out: np.ndarray, ids: np.ndarray, end: int) -> None:
    """Write `ids`, the tokens of a window and the next one, into `out`; if there are fewer, pad."""
    tokens = ids[:-1]
    labels = ids[1:]
    length = len(tokens)
    if length < out.shape[1]:
        blank(out)
    if len(out) == 2:  # the usual case, five times as fast
        out[TOKENS, :length] = tokens
        out[LABELS, :length] = labels
        return
    ended = tokens == end
    documents = np.cumsum(ended) - ended
    # After an end, the next token belongs to a document that this one cannot see.
    labels = np.where(ended, IGNORED, labels.astype(np.int64))
    out[:, :length] = tokens, labels, documents, _positions(documents)


def require_ends(source: Source, key: str) -> None:
    """Raise a UserError if the source does not mark where documents end."""
    if source.end < 0:
        raise UserError(
            f"{key}: these shards do not mark document ends, which document_mask and first-fit "
            "need; name their tokenizer in model.hf_assets_path"
        )


def _positions(documents: np.ndarray) -> np.ndarray:
    """Return 0, 1, 2, … counted from the first token of each document."""
    index = np.arange(len(documents))
    begins = np.concatenate([[True], documents[1:] != documents[:-1]])
    return index - np.maximum.accumulate(np.where(begins, index, 0))


def cut_documents(ends: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the start and input length of each piece of at most seq_len inputs.

    A document of n tokens has n - 1 inputs. Documents of 5 and 3 tokens (ends 5 and 8) at a seq_len
    of 3: starts 0, 3 and 5, lengths 3, 1 and 2.
    """
    begins = np.concatenate([[0], ends[:-1]])
    inputs = ends - begins - 1
    counts = -(-inputs // seq_len)
    document = np.repeat(np.arange(len(ends)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = begins[document] + number * seq_len
    return starts, np.minimum(inputs[document] - number * seq_len, seq_len)


def first_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Put each piece into the first open window with room.

    Return the pieces in the order of their windows, and for each window the number of pieces up to
    its end.
    """
    windows: list[list[int]] = []
    open_windows: list[int] = []  # oldest first
    room = np.zeros(OPEN_WINDOWS, dtype=np.int64)  # of each open window
    for piece, length in enumerate(lengths.tolist()):
        fits = room[: len(open_windows)] >= length
        slot = int(fits.argmax()) if fits.any() else len(open_windows)
        if slot == len(open_windows):
            if len(open_windows) == OPEN_WINDOWS:
                open_windows.pop(0)
                room[:-1] = room[1:]
                slot -= 1
            open_windows.append(len(windows))
            windows.append([])
            room[slot] = capacity
        windows[open_windows[slot]].append(piece)
        room[slot] -= length
        if not room[slot]:
            open_windows.pop(slot)
            room[slot:-1] = room[slot + 1 :]
    order = np.asarray([piece for window in windows for piece in window], dtype=np.int64)
    stops = np.cumsum([len(window) for window in windows], dtype=np.int64)
    return order, stops
