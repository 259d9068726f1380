"""Which tokens stand in a window: the stream cut at fixed places, or documents packed with little padding.

A window is rows of seq_len numbers: tokens, labels (the next tokens, or IGNORED), and where documents are kept apart
the number of the document that a token belongs to, and its position in it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Protocol

import numpy as np

from titanlite.data.sources import Source, cache_folder, locked
from titanlite.errors import UserError

IGNORED = -100
"""The label of a token that does not count."""
OPEN_WINDOWS = 1024
"""First-fit looks at this many windows; beyond that the oldest is closed, so time and memory stay in bounds."""


class Cut(Protocol):
    """Windows of a source by number."""

    samples: int

    def fill(self, out: np.ndarray, number: int) -> None:
        """Write window `number` into `out`: two rows, or four where documents are kept apart."""


class Concatenated:
    """The stream cut every seq_len tokens; nothing is padded, and documents run over the edges."""

    def __init__(self, source: Source, seq_len: int, masked: bool, key: str) -> None:
        self._source, self._seq_len = source, seq_len
        self.samples = (source.tokens - 1) // seq_len
        if self.samples < 1:
            raise UserError(f"{key}: {source.tokens} tokens do not fill one window of {seq_len} and a next one")
        if masked:
            require_ends(source, key)

    def fill(self, out: np.ndarray, number: int) -> None:
        fill(out, self._source.read(number * self._seq_len, self._seq_len + 1), self._source.end)


class Packed:
    """Whole documents in each window, the rest padded; one longer than seq_len is cut into several."""

    def __init__(self, source: Source, seq_len: int, key: str) -> None:
        self._source, self._seq_len = source, seq_len
        require_ends(source, key)
        plan = hashlib.sha256(f"{source.fingerprint} {seq_len} {OPEN_WINDOWS}".encode()).hexdigest()[:16]
        path = cache_folder(source.folder) / f"packed-{plan}.npz"
        with locked(path):
            if not path.exists():
                _write_plan(path, source.document_ends(), seq_len)
        with np.load(path) as arrays:
            self._starts, self._lengths, self._stops = (arrays[name] for name in ("starts", "lengths", "stops"))
        self.samples = len(self._stops)
        if not self.samples:
            raise UserError(f"{key}: no document with two tokens or more")

    def fill(self, out: np.ndarray, number: int) -> None:
        blank(out)
        at = 0
        first = int(self._stops[number - 1]) if number else 0
        for document, piece in enumerate(range(first, int(self._stops[number]))):
            length = int(self._lengths[piece])
            ids = self._source.read(int(self._starts[piece]), length + 1)
            here = slice(at, at + length)
            out[0, here], out[1, here], out[2:3, here] = ids[:-1], ids[1:], document
            at += length
        if len(out) == 4:
            out[3] = _positions(out[2])


def blank(out: np.ndarray) -> None:
    """Fill a window with padding."""
    out[:] = 0
    out[1], out[2:3] = IGNORED, -1


def fill(out: np.ndarray, ids: np.ndarray, end: int) -> None:
    """Write a piece of a stream: the tokens of a window and the one after them, or fewer, and then padding."""
    tokens, labels = ids[:-1], ids[1:]
    if len(tokens) < out.shape[1]:
        blank(out)
    if len(out) == 2:  # most windows are such, and take a fifth of the time
        out[0, : len(tokens)], out[1, : len(tokens)] = tokens, labels
        return
    ended = tokens == end
    documents = np.cumsum(ended) - ended
    labels = np.where(ended, IGNORED, labels.astype(np.int64))  # what follows an end is a document that it can't see
    out[:, : len(tokens)] = tokens, labels, documents, _positions(documents)


def require_ends(source: Source, key: str) -> None:
    if not source.knows_ends:
        raise UserError(
            f"{key}: nothing tells where these shards' documents end, as a document mask and packing must know: "
            "name their tokenizer in model.hf_assets_path"
        )


def _positions(documents: np.ndarray) -> np.ndarray:
    """0, 1, 2, … from the first token of each document."""
    index = np.arange(len(documents))
    begins = np.concatenate([[True], documents[1:] != documents[:-1]])
    return index - np.maximum.accumulate(np.where(begins, index, 0))


def _write_plan(path: Path, ends: np.ndarray, seq_len: int) -> None:
    starts, lengths = cut_documents(ends, seq_len)
    order, stops = first_fit(lengths, seq_len)
    draft = path.with_suffix(".draft.npz")
    np.savez(draft, starts=starts[order], lengths=lengths[order], stops=stops)
    draft.rename(path)


def cut_documents(ends: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Where each piece starts and how many tokens it predicts from: a document of n tokens makes n - 1 of them."""
    begins = np.concatenate([[0], ends[:-1]])
    inputs = ends - begins - 1
    counts = -(-inputs // seq_len)
    document = np.repeat(np.arange(len(ends)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = begins[document] + number * seq_len
    return starts, np.minimum(inputs[document] - number * seq_len, seq_len)


def first_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Put each piece into the first open window with room: pieces window by window, and where each window stops."""
    windows: list[list[int]] = []
    room = np.zeros(OPEN_WINDOWS, dtype=np.int64)  # of the open windows, oldest first
    opened: list[int] = []
    for piece, length in enumerate(lengths.tolist()):
        fits = room[: len(opened)] >= length
        place = int(fits.argmax()) if fits.any() else len(opened)
        if place == len(opened):
            if len(opened) == OPEN_WINDOWS:
                opened.pop(0)
                room[:-1] = room[1:]
                place -= 1
            opened.append(len(windows))
            windows.append([])
            room[place] = capacity
        windows[opened[place]].append(piece)
        room[place] -= length
        if not room[place]:
            opened.pop(place)
            room[place:-1] = room[place + 1 :]
    order = np.asarray([piece for window in windows for piece in window], dtype=np.int64)
    return order, np.cumsum([len(window) for window in windows], dtype=np.int64)
