"""Which sample is the i-th of a job: a function of (seed, i) alone, in constant time and memory.

Sample i of the global batch is therefore the same whatever the data-parallel degree, the loader's workers or the
accumulation, and a resume needs no more than the number of samples consumed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from titanlite.runtime.determinism import derive_seed

ROUNDS = 6
"""Rounds of the Feistel network; four are measurably not random for sets of about 100,000."""
_MIX = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1


@dataclass(frozen=True)
class Permutation:
    """A keyed bijection of range(size)."""

    size: int
    key: int
    _half: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_half", max(1, ((self.size - 1).bit_length() + 1) // 2))

    def __call__(self, index: int) -> int:
        """Walk along the cycle of a permutation of the next power of four until it lands inside the range."""
        while True:
            index = self._encrypt(index)
            if index < self.size:
                return index

    def _encrypt(self, index: int) -> int:
        half, mask = self._half, (1 << self._half) - 1
        left, right = index >> half, index & mask
        for turn in range(ROUNDS):
            mixed = ((right + self.key + turn * _MIX) * _MIX) & _WORD
            mixed = ((mixed ^ (mixed >> 32)) * 0xD6E8FEB86659FD93) & _WORD
            left, right = right, left ^ ((mixed ^ (mixed >> 29)) & mask)
        return (left << half) | right


@dataclass(frozen=True)
class Order:
    """The order of a data set's samples over all epochs, each shuffled anew."""

    samples: int
    seed: int

    def __call__(self, index: int) -> int:
        """The data set's sample that is number `index` of the job."""
        epoch, position = divmod(index, self.samples)
        return _permutation(self.samples, self.seed, epoch)(position)


@lru_cache(maxsize=64)  # of the epochs of each data set; a batch may lie in two of them
def _permutation(samples: int, seed: int, epoch: int) -> Permutation:
    return Permutation(samples, derive_seed("order", seed, epoch))


@dataclass(frozen=True)
class RankSlice:
    """The part of every global batch that one data-parallel rank reads."""

    coordinate: int
    ranks: int
    local: int
    accumulation: int = 1

    def micro_batch(self, first: int, number: int) -> range:
        """Indices of a micro-batch in the step whose first sample is `first`."""
        start = first + (number * self.ranks + self.coordinate) * self.local
        return range(start, start + self.local)

    @property
    def per_step(self) -> int:
        return self.ranks * self.local * self.accumulation
