"""Scales of an axis: where a value lies, which round values are marked, and how they are written."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Axis:
    low: float
    high: float
    log: bool = False

    def share(self, value: float) -> float:
        """Where a value lies between low (0) and high (1)."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, pixels: float, gap: float, whole: bool = False) -> list[float]:
        """Round values, as many as leave `gap` pixels between neighbours."""
        if not self.log:
            return _linear_ticks(self.low, self.high, max(2, int(pixels / gap)), whole)
        found: list[float] = []
        for mantissas, every in _LOG_TICKS:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            values = [m * 10.0**e for e in range(first, last + 1) if e % every == 0 for m in mantissas]
            found = [value for value in values if self.low <= value <= self.high]
            places = [self.share(value) * pixels for value in found]
            if all(b - a >= gap for a, b in zip(places, places[1:], strict=False)):
                break
        return found


def tick_texts(ticks: list[float], log: bool = False) -> list[str]:
    """2.5, 300k, 4e-5: one unit for all of a linear axis, each its own on a logarithmic one."""
    largest = max(map(abs, ticks), default=0.0)
    return [_text(tick, abs(tick) if log else largest) for tick in ticks]


def _text(value: float, size: float) -> str:
    if value == 0:
        return "0"
    if size >= 1e15 or size < 0.01:
        mantissa, exponent = f"{value:.5e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    for unit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if size >= unit:
            return f"{value / unit:.6g}{letter}"
    return f"{value:.6g}"


def _linear_ticks(low: float, high: float, most: int, whole: bool) -> list[float]:
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * (1 - 1e-9))
    step = max(1.0, step if step >= 5 else math.ceil(step)) if whole else step
    digits = max(0, 2 - math.floor(math.log10(step)))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, digits) for i in range(first, last + 1)]


# Mantissas and every how many decades, the densest first.
_LOG_TICKS: list[tuple[list[float], int]] = [
    ([1 + i / 4 for i in range(36)], 1),
    ([1 + i / 2 for i in range(18)], 1),
    ([1, 1.5, 2, 2.5, 3, 4, 5, 6, 8], 1),
    ([1, 1.5, 2, 3, 4, 6], 1),
    ([1, 2, 3, 5], 1),
    ([1, 2, 5], 1),
    ([1, 3], 1),
    *(([1.0], every) for every in (1, 2, 3, 5, 10, 20, 50, 100)),
]
