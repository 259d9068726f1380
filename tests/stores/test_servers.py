"""Other servers of S3's language: `rclone serve s3`, which honors neither conditions nor ranges,
and seaweedfs, which knows users and their rights and compares checksums.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from tests.checkpoint.saved import SAVING
from tests.jobs import TINY, job
from tests.stores.runs import TO, run_at, whole_steps
from tests.stores.server import (
    BUCKET,
    READER,
    FaultProxy,
    credentials,
    needs_extra,
    rclone,
    seaweedfs,
    using,
)
from titanlite.checkpoint import transfer
from titanlite.checkpoint.manifest import MANIFEST, committed
from titanlite.launch.preflight import _check_mirror
from titanlite.runtime import bucket
from titanlite.runtime.bucket import BucketError, check, place
from titanlite.runtime.store import list_folder, read

pytestmark = pytest.mark.long
_FOLDERS = count()


@pytest.fixture(scope="module")
def overwriting(tmp_path_factory) -> Iterator[int]:
    needs_extra()
    with rclone(tmp_path_factory.mktemp("rclone")) as port:
        yield port


@pytest.fixture(scope="module")
def strict(tmp_path_factory) -> Iterator[int]:
    needs_extra()
    with seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as port:
        yield port


@pytest.fixture
def url() -> str:
    return f"s3://{BUCKET}/run-{next(_FOLDERS)}"


def test_a_store_without_conditions_is_refused_as_a_folder_and_warned_of_as_a_mirror(
    overwriting, url, capfd, tmp_path
):
    with using(overwriting):
        with pytest.raises(BucketError, match=f"^{url}: the store overwrites"):
            check(url, exclusive=True)
        argv = [*TINY, f"--job.dump_folder={tmp_path}", "--checkpoint.enable"]
        _check_mirror(job([*argv, f"--checkpoint.mirror={url}"], world=1).config)
        assert list_folder(place(url)) == {}
    lines = capfd.readouterr()
    assert (lines.out + lines.err).count("answers a range with the whole object") == 1


def test_a_large_file_comes_back_whole_from_a_store_without_ranges(overwriting, url, monkeypatch):
    monkeypatch.setattr(bucket, "_RANGE", 1 << 20)
    content = os.urandom(20 << 20)
    with using(overwriting):
        file: Any = place(url) / "large"
        file.bucket.put(file.key, [content], len(content))
        assert read(file) == content


def test_a_run_that_lost_its_disk_goes_on_from_a_store_that_asks_who_it_is(
    strict, url, pool, tmp_path
):
    argv = [*SAVING, f"--checkpoint.folder={url}"]
    here = credentials(strict) | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    run = str(tmp_path / "run")
    before = pool.run(run_at, here, [*argv, TO(2)], run, world=2)
    shutil.rmtree(tmp_path / "run")
    ranks = pool.run(run_at, here, [*argv, TO(3)], run, 2, world=2)
    assert ranks[0]["begun"] == 2
    assert [rank["state"] for rank in ranks] == [rank["state"] for rank in before]
    with using(strict):
        assert whole_steps(url)[-1] == 2


def test_a_user_who_may_only_read_can_read_and_is_refused_as_a_place_to_save(strict, url):
    with using(strict):
        file: Any = place(url) / "file"
        file.bucket.put(file.key, [b"content"], 7)
    with using(strict, **READER):
        assert read(place(url) / "file") == b"content" and [*list_folder(place(url))] == ["file"]
        with pytest.raises(BucketError, match=r"do not allow this.*AccessDenied.*asked to write"):
            check(url)
    wrong = READER | {"AWS_SECRET_ACCESS_KEY": "another"}
    with using(strict, **wrong), pytest.raises(BucketError, match="SignatureDoesNotMatch"):
        check(url)


def test_bytes_that_are_damaged_on_the_way_are_refused_by_the_store(strict, url):
    proxy = FaultProxy(strict)
    with using(proxy.port):
        file: Any = place(url) / "file"
        proxy.rule = lambda method, path: {"damage": 1000} if method == "PUT" else None
        for size in (1 << 20, 20 << 20):  # one request, and parts
            with pytest.raises(BucketError, match="file.*damaged on the way"):
                file.bucket.put(file.key, [os.urandom(size)], size)
        assert list_folder(place(url)) == {}


def test_a_deleted_step_is_gone_from_a_store_that_lists_empty_folders(strict, url):
    with using(strict):
        step: Any = place(url) / "step-2"
        for file in (step / "attempt" / "rank-0.safetensors", step / MANIFEST):
            file.bucket.put(file.key, [b"content"], 7)
        transfer.remove(step)
        assert list_folder(step) == {} and committed(place(url)) == []
