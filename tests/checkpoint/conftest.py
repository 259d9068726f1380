"""Starting a run on one rank."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.saved import start


@pytest.fixture
def begun(pool: Any) -> Callable[[list[str], Path], dict[str, Any]]:
    """Starts a run on one rank; returns what `start` does."""
    return lambda argv, folder: pool.run(start, argv, str(folder), world=1)[0]
