"""Layers that several models share; none knows of parallelism. Models' tables import this file: no torch here."""

from dataclasses import dataclass
from typing import Literal

Score = Literal["softmax", "sigmoid"]
Balance = Literal["sequence", "bias", "none"]
"""How a router keeps its experts evenly used, see `moe.Router`."""


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's scaling of rotary wavelengths.

    Those above original_positions / low_freq_factor are stretched by `factor`, those below original_positions /
    high_freq_factor are kept, and those between are a blend.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192
