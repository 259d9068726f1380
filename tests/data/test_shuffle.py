"""Shuffling: the order of samples is a function of (seed, epoch, index), the same on every mesh."""

import numpy as np
import pytest

from titanlite.data.shuffle import SampleOrder, permute


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 10, 1000, 4096, 4097])
def test_a_permutation_hits_every_index_once(size):
    for key in (0, 12345, 1 << 62):
        assert sorted(permute(i, size, key) for i in range(size)) == list(range(size))


def test_neighboring_samples_and_keys_are_uncorrelated():
    """At these distances a Feistel network of too few rounds shows: four rounds give z = 6.4, two
    250.
    """
    size = 65536
    draws = [
        np.array([permute(i, size, key) for i in range(size)], dtype=float)
        for key in (1, 7920, 15839)
    ]
    pairs = [(draw[:-lag], draw[lag:]) for draw in draws for lag in (1, 128, 256, 512)]
    pairs += [(draws[0], draws[1]), (draws[1], draws[2]), (draws[0], np.arange(size))]
    for first, second in pairs:
        assert abs(np.corrcoef(first, second)[0, 1]) * len(first) ** 0.5 < 4


def test_every_epoch_has_every_sample_once_in_its_own_order():
    order = SampleOrder(samples=7, seed=3)
    epochs = [[order(epoch * 7 + i) for i in range(7)] for epoch in range(20)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 15


def test_a_billion_samples_need_no_time_or_memory():
    assert 0 <= SampleOrder(samples=10**9, seed=0)(10**12) < 10**9
