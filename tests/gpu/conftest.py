"""Fake GPUs for tests, where they can be built."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import fake_gpu


@pytest.fixture(scope="session")
def fake_gpus() -> Path:
    """Return the folder of the library of fake GPUs."""
    try:
        return fake_gpu.build()
    except fake_gpu.Missing as missing:
        pytest.skip(f"fake GPUs: {missing}")


@pytest.fixture(scope="session")
def train_on_gpus(fake_gpus: Path) -> Any:
    """Return a function that trains in a folder on a number of fake GPUs."""
    return partial(fake_gpu.train, fake_gpus)
