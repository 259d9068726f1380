"""Other servers of S3's language: `rclone serve s3`, which honors neither conditions nor ranges,
and seaweedfs, which knows users and their rights and compares checksums.
"""

import os

import pytest

from tests.messages import refused
from tests.stores.server import READER, in_environment
from titanlite.checkpoint.manifest import MANIFEST, committed
from titanlite.runtime import bucket
from titanlite.runtime.bucket import BucketError, check, place

pytestmark = pytest.mark.long
OVERWRITES = pytest.mark.parametrize("store", ["rclone"], indirect=True)
STRICT = pytest.mark.parametrize("store", ["seaweedfs"], indirect=True)


@OVERWRITES
def test_a_large_file_comes_back_whole_from_a_store_without_ranges(url, monkeypatch):
    monkeypatch.setattr(bucket, "_RANGE", 1 << 20)
    content, file = os.urandom(20 << 20), place(url) / "large"
    file.put(content)
    assert file.read_bytes() == content


@STRICT
def test_a_user_who_may_only_read_can_read_and_is_refused_as_a_place_to_save(store, url):
    (place(url) / "file").put(b"content")
    with in_environment(store.environment | READER):
        assert (place(url) / "file").read_bytes() == b"content"
        assert [*place(url).entries()] == ["file"]
        with refused("AccessDenied", "asked to write", kind=BucketError):
            check(url)
    wrong = READER | {"AWS_SECRET_ACCESS_KEY": "another"}
    with (
        in_environment(store.environment | wrong),
        refused("SignatureDoesNotMatch", kind=BucketError),
    ):
        check(url)


@STRICT
@pytest.mark.parametrize("size", [1 << 20, 20 << 20])
def test_bytes_that_are_damaged_on_the_way_are_refused_by_the_store(proxy, url, size):
    proxy.fail("PUT", damage=1000)
    with refused("file", "corrupted", kind=BucketError):
        (place(url) / "file").put(os.urandom(size))
    assert place(url).entries() == {}


@STRICT
def test_a_deleted_step_is_gone_from_a_store_that_lists_empty_folders(url):
    step = place(url) / "step-2"
    for file in (step / "attempt" / "rank-0.safetensors", step / MANIFEST):
        file.put(b"content")
    step.withdraw(MANIFEST)
    assert step.entries() == {} and committed(place(url)) == []
