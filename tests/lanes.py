"""The two lanes of the suite: what is marked `long` runs with --long, or when its file or test is
named.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def sample(values: Iterable[Any], *kept: Any) -> list[Any]:
    """Return the values of pytest.mark.parametrize, all marked long but the kept ones."""
    return [value if value in kept else _long(value) for value in values]


def _long(value: Any) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.long)
