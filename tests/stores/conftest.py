"""The server of these tests, one for all in a process."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.saved import SAVING, run_until
from tests.stores.runs import TO
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


@pytest.fixture(scope="module")
def straight(pool, tmp_path_factory) -> tuple[Path, Any]:
    """An undisturbed run of 6 steps, with a local folder."""
    folder = tmp_path_factory.mktemp("straight")
    ranks = pool.run(run_until, [*SAVING, TO(6)], str(folder), world=2)
    return folder, [rank["state"] for rank in ranks]
