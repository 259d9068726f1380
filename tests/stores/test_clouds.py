"""gs:// and az:// keep what s3:// keeps: on a server of Google's interface in memory, and on
azurite, Microsoft's own.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.lanes import sample
from tests.messages import refused
from tests.stores.server import in_environment
from titanlite.runtime.bucket import BucketError, check, place
from titanlite.runtime.store import read

pytestmark = pytest.mark.parametrize("store", sample(["gs", "az"], "gs"), indirect=True)


def test_an_upload_whose_last_answer_is_lost_is_there_and_one_that_is_refused_is_not(store):
    path: Any = place(store.url) / "file"
    content = os.urandom(20 << 20)
    last = {"gs": "POST uploadId=", "az": "PUT comp=blocklist"}[store.name]

    def fail(**fault: Any) -> list[str]:
        failed = list[str]()

        def rule(method: str, target: str) -> dict[str, Any] | None:
            query = target.partition("?")[2]
            if failed and method == "HEAD" and "lose" not in fault:
                return {"status": 401}  # the first failure is the one that is told
            is_last = f"{method} {query}".startswith(last)
            if not is_last or (failed and "lose" in fault):
                return None
            failed.append(query)
            return fault

        store.proxy.rule = rule
        return failed

    failed = fail(lose=True)
    path.bucket.put(path.key, [content], len(content))
    assert failed and read(path) == content
    fail(status=403)
    with refused("file", "do not allow", kind=BucketError):
        path.bucket.put(path.key, [content[::-1]], len(content))
    assert read(path) == content


@pytest.mark.parametrize("case", ["no bucket", "wrong key"])
def test_what_is_wrong_with_a_place_is_one_line(store, case):
    url, named, environment = store.url, "credentials", dict(store.environment)
    if case == "no bucket":
        url, named = f"{store.name}://nobody/run", "no such bucket"
    elif store.name == "az":
        environment["AZURE_STORAGE_ACCOUNT_KEY"] = "d3Jvbmc="
    else:
        store.proxy.rule = lambda method, path: {"status": 401}
    with in_environment(environment), refused(f"{store.name}://", named, kind=BucketError) as found:
        check(url)
    assert "\n" not in f"{found.value}"
