"""Layers that several models share. No torch in here: a model's table and flavors import this."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretching of the long rotary wavelengths: those beyond original_positions / low_freq_factor by
    `factor`, those below original_positions / high_freq_factor not at all, a blend between."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192
