"""The server of these tests, one for all in a process."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from tests.stores.server import BUCKET, FaultProxy, moto, needs_extra, using

_FOLDERS = count()


@pytest.fixture(scope="session")
def port() -> Iterator[int]:
    needs_extra()
    with moto() as port:
        yield port


@pytest.fixture
def proxy(port: int) -> Iterator[FaultProxy]:
    """A proxy before the server, which s3:// leads to in this process."""
    proxy = FaultProxy(port)
    with using(proxy.port):
        yield proxy


@pytest.fixture
def url(proxy: FaultProxy) -> str:
    """An empty place in the bucket."""
    return f"s3://{BUCKET}/{next(_FOLDERS)}"
