"""What a message must name; its wording is free to be mended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from titanlite.errors import UserError


def says(message: object, *parts: object) -> None:
    """Require that a message names each part: a key, a value, a remedy; not how it puts them."""
    text = str(message)
    missing = [part for part in map(str, parts) if part not in text]
    assert not missing, f"{missing} not in:\n{text}"


@contextmanager
def refused(*parts: object, kind: type[BaseException] = UserError) -> Iterator[Any]:
    """Require an error whose message names each part."""
    with pytest.raises(kind) as caught:
        yield caught
    says(caught.value, *parts)
