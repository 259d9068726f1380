"""Choose the source of the i-th sample of a mixture, as a function of i and the weights.

Among the first n samples, each source has its weight times n, to within one sample, for every n.
"""

from collections.abc import Sequence
from fractions import Fraction
from heapq import heapify, heappop, heappush
from math import ceil, lcm

from titanlite.data.fingerprint import fingerprint
from titanlite.data.packing_plan import PART_TOKENS
from titanlite.data.sources import Source


class Mixture:
    """Map a sample index to (source, sample number of that source).

    The pattern, by Tijdeman's algorithm for the chairman assignment problem, repeats with the
    weights' denominator.
    """

    def __init__(self, weights: tuple[float, ...]) -> None:
        shares = [Fraction(str(weight)) for weight in weights]
        self.period = lcm(*(share.denominator for share in shares))
        self._per_period = [int(share * self.period) for share in shares]
        assert sum(self._per_period) == self.period, (
            "the config rules refuse weights that do not add up to 1"
        )
        self._pattern = _earliest_deadline_first(self._per_period)

    def __call__(self, index: int) -> tuple[int, int]:
        cycle, position = divmod(index, self.period)
        source, number = self._pattern[position]
        return source, cycle * self._per_period[source] + number


def identify(
    sources: Sequence[Source], weights: Sequence[float], seq_len: int, packing: str
) -> str:
    """Return an identifier of the windows of these sources."""
    identity = [str(seq_len), packing, str(PART_TOKENS)]
    for source, weight in zip(sources, weights, strict=True):
        identity.append(f"{source.fingerprint} {weight}")
    return fingerprint(" ".join(identity))


def _earliest_deadline_first(counts: list[int]) -> list[tuple[int, int]]:
    """Return one period of (source, sample number): source k counts[k] times, always within a
    sample of its share.
    """
    period = sum(counts)
    slack = Fraction(1) if len(counts) < 2 else 1 - Fraction(1, 2 * len(counts) - 2)
    served = [0] * len(counts)
    pattern = []
    # Source k may be served once n * share - served[k] >= 1 - slack, and must be served before
    # that exceeds slack.
    later = []
    for k, count in enumerate(counts):
        if count:
            later.append((_first(1 - slack, period, count), k))
    heapify(later)
    due: list[tuple[Fraction, int]] = []
    for n in range(1, period + 1):
        while later and later[0][0] <= n:
            _, k = heappop(later)
            heappush(due, ((slack + served[k]) * period / counts[k], k))
        _, chosen = heappop(due)
        pattern.append((chosen, served[chosen]))
        served[chosen] += 1
        heappush(later, (_first(1 - slack + served[chosen], period, counts[chosen]), chosen))
    return pattern


def _first(share: Fraction, period: int, count: int) -> int:
    """Return the first sample at which a source with `count` per period is due this share."""
    return ceil(share * period / count)
