"""Windows in which some tokens are read but not predicted."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from titanlite.data.chat import READ_ONLY
from titanlite.data.packing import IGNORED, LABELS, TOKENS


class WindowSource(Protocol):
    """Windows by number."""

    @property
    def samples(self) -> int: ...

    def fill(self, out: np.ndarray, number: int) -> None: ...


@dataclass
class Trained:
    """Windows of chats, with the labels of READ_ONLY tokens ignored."""

    windows: WindowSource

    @property
    def samples(self) -> int:
        return self.windows.samples

    def fill(self, out: np.ndarray, number: int) -> None:
        self.windows.fill(out, number)
        out[LABELS, out[LABELS] >= READ_ONLY] = IGNORED
        out[TOKENS] %= READ_ONLY
