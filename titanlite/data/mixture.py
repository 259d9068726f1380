"""Which source the i-th sample of a mixture comes from: a function of i alone.

At every prefix of n samples, each source has had its weight times n, to within one sample.
"""

from __future__ import annotations

from fractions import Fraction
from math import lcm

import numpy as np


class Mixture:
    """Assigns sample numbers to sources: `source, number = mixture(i)` is the number-th sample of that source.

    The pattern repeats after as many samples as the weights' common denominator; within it every sample goes to the
    source that is due first (Tijdeman's rule for the chairman assignment problem).
    """

    def __init__(self, weights: tuple[float, ...]) -> None:
        shares = [Fraction(str(weight)) for weight in weights]
        self.period = lcm(*(share.denominator for share in shares))
        self._per_period = [int(share * self.period) for share in shares]
        assert sum(self._per_period) == self.period, "config/check.py lets only weights pass that add up to 1"
        self._pattern = _due_first(self._per_period)
        self._number = np.zeros(self.period, dtype=np.int64)
        for source in range(len(weights)):
            mine = self._pattern == source
            self._number[mine] = np.arange(mine.sum())

    def __call__(self, index: int) -> tuple[int, int]:
        turn, place = divmod(index, self.period)
        source = int(self._pattern[place])
        return source, turn * self._per_period[source] + int(self._number[place])


def _due_first(counts: list[int]) -> np.ndarray:
    """A period in which source k appears counts[k] times, never a whole sample ahead of or behind its share."""
    period = sum(counts)
    slack = Fraction(1) if len(counts) < 2 else 1 - Fraction(1, 2 * len(counts) - 2)
    had = [0] * len(counts)
    pattern = np.zeros(period, dtype=np.int16)
    for n in range(1, period + 1):
        # A source may be served once n * share - had >= 1 - slack, and must be before that exceeds slack.
        due = [
            ((slack + had[k]) * period / count, k)
            for k, count in enumerate(counts)
            if n * count - had[k] * period >= (1 - slack) * period
        ]
        _, chosen = min(due)
        had[chosen] += 1
        pattern[n - 1] = chosen
    return pattern
