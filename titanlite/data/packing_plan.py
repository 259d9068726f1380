"""Pack documents into windows by first-fit: once per source, into a file next to it."""

from bisect import bisect_right
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import BinaryIO

import numpy as np

from titanlite.data.fingerprint import fingerprint
from titanlite.data.prepare import cached_file
from titanlite.data.sources import Source
from titanlite.runtime.cluster import cores
from titanlite.runtime.page import OWN_PAGE, phase
from titanlite.runtime.parent import exit_with_parent

OPEN_WINDOWS = 1024
"""Windows that first-fit keeps open; it closes the oldest beyond these to bound time and memory."""
PART_TOKENS = 1 << 30
"""Tokens of a source that are packed independently; documents are cut at the boundary."""


def open_plan(source: Source, seq_len: int) -> "PackingPlan":
    """Map the plan of a source's documents; create it if there is none."""
    identity = f"{source.fingerprint} {source.state} {source.end} {seq_len} {OPEN_WINDOWS}"
    name = f"packed-{fingerprint(f'{identity} {PART_TOKENS}')}.plan"
    with phase("packing"):
        return cached_file(source.folder, name, PackingPlan, partial(_write_plan, source, seq_len))


class PackingPlan:
    """The pieces of documents in each window, in a memory-mapped file of uint32.

    For each part of the source, the file lists the piece where each window stops, the pieces'
    starts in the part, and their lengths. It ends with the numbers of windows and pieces of each
    part, and the number of parts.
    """

    def __init__(self, path: Path) -> None:
        """Raise ValueError if the file is incomplete."""
        self._numbers = np.memmap(path, dtype=np.uint32, mode="r")
        parts = int(self._numbers[-1])
        counts = self._numbers[-1 - 2 * parts : -1].astype(np.int64).reshape(parts, 2)
        sizes = counts @ [1, 2]  # a window has one number, a piece two
        if sizes.sum() + counts.size + 1 != len(self._numbers):
            raise ValueError("its sizes contradict its end")
        self._counts = counts
        self._window_stops = np.cumsum(counts[:, 0])
        self._begins = np.cumsum(sizes) - sizes
        self.windows = int(self._window_stops[-1])

    def pieces(self, window: int) -> Iterator[tuple[int, int]]:
        """Yield the start and the length of each piece of a window."""
        part = bisect_right(self._window_stops, window)
        windows, pieces = self._counts[part]
        begin = int(self._begins[part])
        stops = self._numbers[begin : begin + windows]
        starts = self._numbers[begin + windows :][:pieces]
        lengths = self._numbers[begin + windows + pieces :][:pieces]
        own = window - int(self._window_stops[part] - windows)
        first = int(stops[own - 1]) if own else 0
        for piece in range(first, int(stops[own])):
            yield part * PART_TOKENS + int(starts[piece]), int(lengths[piece])


def _write_plan(source: Source, seq_len: int, file: BinaryIO) -> None:
    """Plan the parts of a source on all cores, and write them for a `PackingPlan`."""
    begins = range(0, source.tokens, PART_TOKENS)
    parts = [(begin, min(begin + PART_TOKENS, source.tokens)) for begin in begins]
    plan = partial(_plan, source, seq_len)
    counts = list[int]()
    with ProcessPoolExecutor(
        min(cores(), len(parts)), get_context("forkserver"), exit_with_parent
    ) as pool:
        plans = map(plan, parts) if len(parts) == 1 else pool.map(plan, parts)
        for stops, starts, lengths in plans:
            for numbers in (stops, starts, lengths):
                file.write(numbers.astype(np.uint32).tobytes())
            counts += [len(stops), len(starts)]
            OWN_PAGE.enter("packing")  # shows that this is not a hang
    file.write(np.asarray([*counts, len(parts)], dtype=np.uint32).tobytes())


def _plan(
    source: Source, seq_len: int, part: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return how many pieces precede each window's end in a part, and their starts and lengths."""
    starts, lengths = cut_documents(source.document_ends(*part) - part[0], seq_len)
    order, stops = first_fit(lengths, seq_len)
    return stops, starts[order], lengths[order]


def cut_documents(ends: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the start and input length of each piece of at most seq_len inputs.

    A document of n tokens has n - 1 inputs. For example, documents of 5 and 3 tokens (ends 5 and 8)
    with a seq_len of 3 have starts 0, 3 and 5, and lengths 3, 1 and 2.
    """
    begins = np.concatenate([[0], ends[:-1]])
    inputs = ends - begins - 1
    counts = -(-inputs // seq_len)
    document = np.repeat(np.arange(len(ends)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = begins[document] + number * seq_len
    return starts, np.minimum(inputs[document] - number * seq_len, seq_len)


def first_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Put each piece into the first open window that has room.

    Return the pieces in the order of their windows, and the number of pieces up to the end of each
    window.
    """
    windows: list[list[int]] = []
    open_windows: list[int] = []  # oldest first
    room = np.zeros(OPEN_WINDOWS, dtype=np.int64)  # in each open window
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
    order = np.asarray([*chain(*windows)], dtype=np.int64)
    stops = np.cumsum([len(window) for window in windows], dtype=np.int64)
    return order, stops
