"""Azurite, Microsoft's own server of Azure's blobs, on loopback; npm brings it."""

import base64
import hashlib
import hmac
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from tests.stores.server import BUCKET, free_port, running

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Azurite's account and its key, which are published and the same everywhere."""
VERSION = "2021-12-02"
INSTALLED = Path(sys.prefix) / "azurite/node_modules/.bin/azurite-blob"
"""Where .ci/run installs it."""


@contextmanager
def azurite() -> Iterator[int]:
    """Run a server with an empty container; yield its port."""
    program = str(INSTALLED) if INSTALLED.exists() else shutil.which("azurite-blob")
    if not program:
        pytest.skip(f"azurite is not installed: npm install --prefix {sys.prefix}/azurite azurite")
    port = free_port()
    options = ["--inMemoryPersistence", "--silent", "--skipApiVersionCheck", "--disableTelemetry"]
    with running([program, "--blobPort", str(port), *options], port):
        _make_container(port)
        yield port


def _make_container(port: int) -> None:
    """Make the container, by a request that is signed as Azure documents it."""
    date = formatdate(usegmt=True)
    nothing = "\n" * 12  # eleven headers that this request does not have
    headers = f"x-ms-date:{date}\nx-ms-version:{VERSION}\n"
    text = f"PUT{nothing}{headers}/{ACCOUNT}/{ACCOUNT}/{BUCKET}\nrestype:container"
    digest = hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()
    request = Request(
        f"http://127.0.0.1:{port}/{ACCOUNT}/{BUCKET}?restype=container",
        method="PUT",
        headers={
            "x-ms-date": date,
            "x-ms-version": VERSION,
            "Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}",
        },
    )
    urlopen(request).close()


def account(port: int) -> dict[str, str]:
    """Return the environment in which az:// is a server on this port."""
    return {
        "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
        "AZURE_STORAGE_ACCOUNT_KEY": KEY,
        "AZURE_ENDPOINT": f"http://127.0.0.1:{port}/{ACCOUNT}",
    }
