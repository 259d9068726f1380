"""Requests to object stores: bounded, repeated where an answer is lost, and their faults in one
line. gs:// is a server of Google's interface in memory, and az:// azurite, Microsoft's own.
"""

import os
import re
import socket
import sys
from typing import Any

import pytest

from tests.jobs import TINY, job
from tests.lanes import sample
from tests.messages import refused
from tests.stores.conftest import CLOUDS
from tests.stores.server import BUCKET, needs_extra
from titanlite.checkpoint.root import checkpoint_root
from titanlite.runtime import bucket
from titanlite.runtime.bucket import BucketError, Unreachable, Uploads, check, copy_file, place

NAMES = re.compile(r"AWS_|GOOGLE_|AZURE_|GCE_")


LOST = ("s3", {"lose": True}), ("gs", {"lose": True}), ("az", {"lose": True})
BUSY, CUT, HANGS = ("s3", {"status": 503}), ("s3", {"cut": 3}), ("s3", {"hang": 2})


@pytest.mark.parametrize(
    ("store", "fault"), sample([*LOST, BUSY, CUT, HANGS], *LOST[:2]), indirect=["store"]
)
def test_a_request_that_fails_once_is_sent_again(store, tmp_path, fault, monkeypatch):
    monkeypatch.setattr(bucket, "_TIMEOUT", 1)
    path, content = place(f"{store.url}/file"), os.urandom(1 << 20)
    (tmp_path / "file").write_bytes(content)
    met = store.proxy.fail_once(fault)
    copy_file(tmp_path / "file", path)
    assert path.read_bytes() == content and place(store.url).entries().keys() == {"file"}
    assert len(met) >= 3


def test_a_store_that_never_answers_is_given_up(proxy, url, tmp_path, monkeypatch):
    monkeypatch.setattr(bucket, "_TIMEOUT", 0.5)
    proxy.fail("", hang=30)
    with refused(f"s3://{BUCKET}", "no answer", kind=Unreachable):
        check(url, patience=1)


@pytest.mark.long
def test_a_download_may_take_longer_than_a_request(url, proxy, monkeypatch):
    """As one request a file of 4 s fails: all tries together have 3 s."""
    monkeypatch.setattr(bucket, "_TIMEOUT", 2)
    monkeypatch.setattr(bucket, "_RANGE", 1 << 18)
    path = place(url, patience=1) / "large"
    content = os.urandom(8 << 20)
    path.put(content)
    proxy.fail("GET", pace=2 << 20)
    assert path.read_bytes() == content


def test_a_file_that_changes_while_it_is_read_is_named(url, monkeypatch):
    monkeypatch.setattr(bucket, "_RANGE", 1 << 20)
    path = place(url) / "large"
    path.put(bytes(3 << 20))
    blocks = path.bucket.blocks(path.key)
    next(blocks)
    path.put(os.urandom(3 << 20))
    with refused("large", "changed", kind=BucketError):
        next(blocks)


@pytest.mark.long
def test_parts_grow_with_the_file_so_that_ten_thousand_are_enough(proxy, url):
    blocks = [bytes(1 << 20)] * 20
    for size, parts in ((20 << 20, 2), (1 << 40, 1)):
        sent = proxy.fail("partNumber")  # without a fault
        place(url).bucket.put(f"big-{size}", iter(blocks), size)
        assert len(sent) == parts
        assert size / max(Uploads().part, size // bucket._MOST_PARTS) < 10_000


def bounded(url: str) -> Any:
    """Return the place of checkpoints of a config with bounds of uploads."""
    keys = {"folder": url, "part_mib": 5, "upload_parallel": 2, "stall_timeout_seconds": 2}
    argv = [*TINY, "--checkpoint.enable", *(f"--checkpoint.{k}={v}" for k, v in keys.items())]
    return checkpoint_root(job(argv, world=1).config)


def test_an_upload_keeps_to_the_bounds_of_the_config(proxy, url):
    """Also of one block, such as a large tensor. A part that is not answered is sent again."""
    path, content = bounded(url) / "file", os.urandom(20 << 20)
    proxy.fail("partNumber", rate=20 << 20)
    path.put(content)
    parts = {path.partition("&")[0] for _, path in proxy.log if "partNumber" in path}
    assert len(parts) == 4 and proxy.most_parts == 2
    tries = proxy.fail("partNumber=2", times=1, hang=99)
    path.put(content[::-1])
    assert len(tries) == 2 and path.read_bytes() == content[::-1]


def test_a_part_that_is_never_answered_is_named_and_given_up(proxy, url, monkeypatch):
    monkeypatch.setattr(bucket, "_PATIENCE_SECONDS", 1)
    path = bounded(url) / "file"
    tries = proxy.fail("partNumber=2", hang=99)
    with refused(path, "part 2", kind=Unreachable):
        path.put(bytes(20 << 20))
    assert 2 <= len(tries) <= 3


@pytest.mark.parametrize("store", sample(["gs", "az"], "gs"), indirect=True)
def test_an_upload_whose_last_answer_is_lost_is_there_and_one_that_is_refused_is_not(store):
    path = place(store.url) / "file"
    content = os.urandom(20 << 20)
    last = {"gs": r"POST .*\?uploadId=", "az": "PUT .*comp=blocklist"}[store.name]
    lost = store.proxy.fail(last, times=1, lose=True)
    path.put(content)
    assert lost and path.read_bytes() == content
    met = store.proxy.fail(last, status=403)
    refuse = store.proxy.rule
    store.proxy.rule = lambda method, path: (  # the first failure is the one that is told
        {"status": 401} if method == "HEAD" and met else refuse(method, path)
    )
    with refused("file", "do not allow", kind=BucketError):
        path.put(content[::-1])
    assert path.read_bytes() == content


def test_a_forked_process_is_refused_instead_of_hanging(proxy, url, tmp_path):
    (tmp_path / "file").write_bytes(b"content")
    copy_file(tmp_path / "file", place(f"{url}/file"))
    child = os.fork()
    if not child:
        try:
            place(f"{url}/file").read_bytes()
        except RuntimeError as error:
            os._exit(0 if "before a fork" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert place(f"{url}/file").read_bytes() == b"content"


REFUSED = [("s3", 403, "credentials"), ("gs", 401, "credentials"), ("az", 403, "credentials")]
REFUSED.append(("s3", 301, "set AWS_REGION"))


@pytest.mark.parametrize(
    ("store", "status", "named"), sample(REFUSED, *REFUSED[:2], REFUSED[3]), indirect=["store"]
)
def test_a_refusal_is_one_line_that_names_what_was_asked(store, status, named):
    store.proxy.fail("PUT", status=status)
    with refused(f"{store.name}://{BUCKET}", named, "asked to write", kind=BucketError) as caught:
        check(store.url)
    assert "\n" not in str(caught.value) and not isinstance(caught.value, Unreachable)


@pytest.mark.parametrize("store", CLOUDS, indirect=True)
def test_a_missing_bucket_is_one_line_that_names_it(store):
    with refused(f"{store.name}://nobody", "no such bucket", kind=BucketError) as caught:
        check(f"{store.name}://nobody/run")
    assert "\n" not in str(caught.value) and not isinstance(caught.value, Unreachable)


def test_a_store_that_is_not_there_is_told_from_a_missing_bucket(url, monkeypatch):
    bucket._open.cache_clear()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with refused("s3://bucket", "listens", kind=Unreachable):
        check(url, patience=0.5)


KEY, SECRET = "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"


@pytest.mark.parametrize(
    ("url", "environment", "named"),
    [
        ("ftp://bucket/run", {}, "legal: s3://, gs:// or az://"),
        ("s3://bucket", {}, f"set {KEY}"),
        ("s3://bucket", {KEY: "x"}, SECRET),
        ("s3://bucket", {KEY: "x", SECRET: "x"}, "AWS_REGION"),
        ("gs://bucket", {}, "set GOOGLE_APPLICATION_CREDENTIALS"),
        ("az://bucket", {}, "set AZURE_STORAGE_ACCOUNT_NAME"),
    ],
)
def test_without_credentials_the_remedy_is_named_and_no_metadata_address_is_asked(
    url, environment, named, monkeypatch, tmp_path
):
    needs_extra()
    bucket._open.cache_clear()
    for name in filter(NAMES.match, [*os.environ]):
        monkeypatch.delenv(name)
    with socket.create_server(("127.0.0.1", 0)) as metadata:
        metadata.setblocking(False)
        address = f"http://127.0.0.1:{metadata.getsockname()[1]}"
        own = {"HOME": str(tmp_path), "AWS_EC2_METADATA_SERVICE_ENDPOINT": address}
        for name, value in {**own, **environment}.items():
            monkeypatch.setenv(name, value)
        with refused(named, kind=BucketError) as caught:
            place(url)
        with pytest.raises(BlockingIOError):
            metadata.accept()
    assert "\n" not in str(caught.value)


def test_without_the_extra_the_line_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    bucket._open.cache_clear()
    with refused('pip install "titanlite[remote]"'):
        place("s3://bucket")
