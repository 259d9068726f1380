"""The two lanes of the suite: the default one, and all, which adds what is marked `long`; and what
a test needs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch


def sample(
    values: Iterable[Any],
    *kept: Any,
    long: Iterable[Any] | None = None,
    every: int = 1,
    nightly: Iterable[Any] = (),
) -> list[Any]:
    """Return the values of pytest.mark.parametrize: the kept ones in the default lane; those in
    `nightly` marked nightly; of the others those in `long`, or each `every`th one, marked long.
    The rest are not tested.
    """
    values = [*values]
    others = [value for value in values if value not in (*kept, *nightly)]
    in_long = others[::every] if long is None else [*long]
    marks = {"nightly": [*nightly], "long": in_long}
    found = []
    for value in values:
        names = [name for name, marked in marks.items() if value in marked]
        if names or value in kept:
            found.append(_marked(value, *names))
    return found


def _marked(value: Any, *names: str) -> Any:
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=[getattr(pytest.mark, name) for name in names])


def needs_gpus(count: int) -> pytest.MarkDecorator:
    """Return the mark of a test, or of one of its parameters, that runs where there are GPUs."""
    return pytest.mark.skipif(
        torch.cuda.device_count() < count, reason=f"needs {count} GPU{'s' if count > 1 else ''}"
    )
