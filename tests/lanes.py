"""The two lanes of the suite: the default one, and all, which adds what is marked `long`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def sample(
    values: Iterable[Any], *kept: Any, long: Iterable[Any] | None = None, every: int = 1
) -> list[Any]:
    """Return the values of pytest.mark.parametrize: the kept ones in the default lane; of the
    others those in `long`, or each `every`th one, marked long. The rest are not tested.
    """
    values = [*values]
    others = [value for value in values if value not in kept]
    in_long = others[::every] if long is None else [*long]
    return [
        value if value in kept else _long(value)
        for value in values
        if value in kept or value in in_long
    ]


def _long(value: Any) -> Any:
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=pytest.mark.long)
