"""Cut a token source into windows: the stream every seq_len tokens, or documents packed with little padding.

A window has rows of seq_len numbers: tokens, labels (the next tokens, or IGNORED), and under a document mask also the
number of each token's document and its position in it.
"""

import hashlib

import numpy as np

from titanlite.data.prepare import cached_arrays
from titanlite.data.sources import Source
from titanlite.errors import UserError

IGNORED = -100  # the label of a position that does not count in the loss
OPEN_WINDOWS = 1024  # first-fit closes the oldest window beyond these, which bounds time and memory


class Concatenated:
    """The stream cut every seq_len tokens, without padding; documents continue in the next window."""

    def __init__(self, source: Source, seq_len: int, masked: bool, key: str) -> None:
        self._source, self._seq_len = source, seq_len
        self.samples = (source.tokens - 1) // seq_len
        if self.samples < 1:
            raise UserError(f"{key}: dataset too small: {source.tokens} tokens, need at least {seq_len + 1}")
        if masked:
            require_ends(source, key)

    def fill(self, out: np.ndarray, number: int) -> None:
        """Write window `number` into `out`, of two rows, or four under a document mask."""
        fill(out, self._source.read(number * self._seq_len, self._seq_len + 1), self._source.end)


class Packed:
    """Whole documents in each window, the rest padding; a document longer than seq_len is cut."""

    def __init__(self, source: Source, seq_len: int, key: str) -> None:
        self._source, self._seq_len = source, seq_len
        require_ends(source, key)
        plan_of = f"{source.fingerprint} {source.state} {source.end} {seq_len} {OPEN_WINDOWS}"
        plan_hash = hashlib.sha256(plan_of.encode()).hexdigest()[:16]
        plan = cached_arrays(source.folder, f"packed-{plan_hash}.npz", lambda: _plan(source.document_ends(), seq_len))
        self._starts, self._lengths, self._stops = plan
        self.samples = len(self._stops)
        if not self.samples:
            raise UserError(f"{key}: no document has two tokens or more")

    def fill(self, out: np.ndarray, number: int) -> None:
        blank(out)
        start = 0
        first = int(self._stops[number - 1]) if number else 0
        for document, piece in enumerate(range(first, int(self._stops[number]))):
            length = int(self._lengths[piece])
            ids = self._source.read(int(self._starts[piece]), length + 1)
            span = slice(start, start + length)
            out[0, span], out[1, span], out[2:3, span] = ids[:-1], ids[1:], document
            start += length
        if len(out) == 4:
            out[3] = _positions(out[2])


def _plan(ends: np.ndarray, seq_len: int) -> list[np.ndarray]:
    """Return the start and length of each piece in the order of the windows, and where each window's pieces stop."""
    starts, lengths = cut_documents(ends, seq_len)
    order, stops = first_fit(lengths, seq_len)
    return [starts[order], lengths[order], stops]


WindowSource = Concatenated | Packed


def blank(out: np.ndarray) -> None:
    """Fill a window with padding."""
    out[:] = 0
    out[1], out[2:3] = IGNORED, -1


def fill(out: np.ndarray, ids: np.ndarray, end: int) -> None:
    """Write `ids`, the tokens of a window and the next one, into `out`; if there are fewer, pad."""
    tokens, labels = ids[:-1], ids[1:]
    if len(tokens) < out.shape[1]:
        blank(out)
    if len(out) == 2:  # the usual case, five times as fast
        out[0, : len(tokens)], out[1, : len(tokens)] = tokens, labels
        return
    ended = tokens == end
    documents = np.cumsum(ended) - ended
    labels = np.where(ended, IGNORED, labels.astype(np.int64))  # the next token is of a document it cannot see
    out[:, : len(tokens)] = tokens, labels, documents, _positions(documents)


def require_ends(source: Source, key: str) -> None:
    """Raise a UserError if the source does not mark where documents end."""
    if source.end < 0:
        raise UserError(
            f"{key}: these shards do not mark document ends, which document_mask and first-fit need; "
            "name their tokenizer in model.hf_assets_path"
        )


def _positions(documents: np.ndarray) -> np.ndarray:
    """Return 0, 1, 2, … counted from the first token of each document."""
    index = np.arange(len(documents))
    begins = np.concatenate([[True], documents[1:] != documents[:-1]])
    return index - np.maximum.accumulate(np.where(begins, index, 0))


def cut_documents(ends: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the start and input length of each piece of at most seq_len; a document of n tokens has n - 1 inputs."""
    begins = np.concatenate([[0], ends[:-1]])
    inputs = ends - begins - 1
    counts = -(-inputs // seq_len)
    document = np.repeat(np.arange(len(ends)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = begins[document] + number * seq_len
    return starts, np.minimum(inputs[document] - number * seq_len, seq_len)


def first_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Put each piece into the first open window with room.

    Return the pieces in the order of their windows, and for each window the number of pieces up to its end.
    """
    windows: list[list[int]] = []
    room = np.zeros(OPEN_WINDOWS, dtype=np.int64)  # of the open windows, oldest first
    open_windows: list[int] = []
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
    return order, np.cumsum([len(window) for window in windows], dtype=np.int64)
