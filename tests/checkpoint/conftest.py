"""Runs on the pool's ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.saved import run_until, start


@pytest.fixture
def begun(pool: Any) -> Callable[[list[str], Path], dict[str, Any]]:
    """Starts a run on one rank; returns what `start` does."""
    return lambda argv, folder: pool.run(start, argv, str(folder), world=1)[0]


@pytest.fixture(scope="session")
def train(pool: Any) -> Callable[..., list[dict[str, Any]]]:
    """Trains on some ranks; returns what `run_until` does on each."""
    return lambda argv, folder, stop=None, ranks=1: pool.run(
        run_until, argv, str(folder), stop, world=ranks
    )
