import os
from collections.abc import Iterator
from unittest import mock

import pytest


@pytest.fixture(autouse=True)
def _variables_stay() -> Iterator[None]:
    """A launcher in this process sets variables for the ranks that it would fork."""
    with mock.patch.dict(os.environ):
        yield
