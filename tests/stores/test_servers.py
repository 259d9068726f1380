"""Other servers of S3's language: `rclone serve s3`, which honors neither conditions nor ranges,
and seaweedfs, which knows users and their rights and compares checksums.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.jobs import TINY, job
from tests.messages import refused
from tests.stores.server import READER, in_environment
from titanlite.checkpoint import transfer
from titanlite.checkpoint.manifest import MANIFEST, committed
from titanlite.launch.preflight import _check_mirror
from titanlite.runtime import bucket
from titanlite.runtime.bucket import BucketError, check, place
from titanlite.runtime.store import list_folder, read

pytestmark = pytest.mark.long
OVERWRITES = pytest.mark.parametrize("store", ["rclone"], indirect=True)
STRICT = pytest.mark.parametrize("store", ["seaweedfs"], indirect=True)


def put(path: Any, content: bytes) -> None:
    path.bucket.put(path.key, [content], len(content))


@OVERWRITES
def test_a_store_without_conditions_is_refused_as_a_folder_and_warned_of_as_a_mirror(
    url, capfd, tmp_path
):
    with refused(url, "overwrites", kind=BucketError):
        check(url, exclusive=True)
    argv = [*TINY, f"--job.dump_folder={tmp_path}", "--checkpoint.enable"]
    _check_mirror(job([*argv, f"--checkpoint.mirror={url}"], world=1).config)
    assert list_folder(place(url)) == {}
    assert "".join(capfd.readouterr()).count("range") == 1


@OVERWRITES
def test_a_large_file_comes_back_whole_from_a_store_without_ranges(url, monkeypatch):
    monkeypatch.setattr(bucket, "_RANGE", 1 << 20)
    content, file = os.urandom(20 << 20), place(url) / "large"
    put(file, content)
    assert read(file) == content


@STRICT
def test_a_user_who_may_only_read_can_read_and_is_refused_as_a_place_to_save(store, url):
    put(place(url) / "file", b"content")
    with in_environment(store.environment | READER):
        assert read(place(url) / "file") == b"content" and [*list_folder(place(url))] == ["file"]
        with refused("AccessDenied", "asked to write", kind=BucketError):
            check(url)
    wrong = READER | {"AWS_SECRET_ACCESS_KEY": "another"}
    with (
        in_environment(store.environment | wrong),
        refused("SignatureDoesNotMatch", kind=BucketError),
    ):
        check(url)


@STRICT
@pytest.mark.parametrize("size", [1 << 20, 20 << 20], ids=["one request", "parts"])
def test_bytes_that_are_damaged_on_the_way_are_refused_by_the_store(proxy, url, size):
    proxy.rule = lambda method, path: {"damage": 1000} if method == "PUT" else None
    with refused("file", "damaged", kind=BucketError):
        put(place(url) / "file", os.urandom(size))
    assert list_folder(place(url)) == {}


@STRICT
def test_a_deleted_step_is_gone_from_a_store_that_lists_empty_folders(url):
    step = place(url) / "step-2"
    for file in (step / "attempt" / "rank-0.safetensors", step / MANIFEST):
        put(file, b"content")
    transfer.remove(step)
    assert list_folder(step) == {} and committed(place(url)) == []
