"""The three lanes of the suite: the default one; what is marked `long`, in .ci/run; and what is
marked `exhaustive`, further rows of a promise that the others sample.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def sample(
    values: Iterable[Any], *kept: Any, long: Iterable[Any] | None = None, every: int = 1
) -> list[Any]:
    """Return the values of pytest.mark.parametrize: the kept ones in the default lane; of the
    others those in `long`, or each `every`th one, marked long, and the rest marked exhaustive.
    """
    values = [*values]
    others = [value for value in values if value not in kept]
    in_long = others[::every] if long is None else [*long]
    return [
        value if value in kept else _marked(value, "long" if value in in_long else "exhaustive")
        for value in values
    ]


def _marked(value: Any, lane: str) -> Any:
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=getattr(pytest.mark, lane))
