"""gs:// and az:// keep what s3:// keeps: on a server of Google's interface in memory, and on
azurite, Microsoft's own.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.saved import SAVING, run_until
from tests.lanes import sample
from tests.stores import azure, gs
from tests.stores.runs import QUIET, TO, run_at, whole_steps
from tests.stores.server import BUCKET, FaultProxy, in_environment, needs_extra
from tests.stores.test_cp import contents
from tests.stores.test_shards import ids, opened
from titanlite.checkpoint import lease
from titanlite.checkpoint.lease import Lease
from titanlite.checkpoint.manifest import committed, step_folder
from titanlite.cli import main
from titanlite.errors import RunFailed, UserError
from titanlite.runtime.bucket import BucketError, check, place
from titanlite.runtime.store import copy, list_folder, read

CLOUDS = ["gs", pytest.param("az", marks=pytest.mark.long)]


@dataclass
class Cloud:
    """A store behind a proxy, and the environment that leads there."""

    scheme: str
    proxy: FaultProxy
    environment: dict[str, str]
    folders: Iterator[int] = field(default_factory=count)

    def empty(self) -> str:
        return f"{self.scheme}://{BUCKET}/{next(self.folders)}"


@pytest.fixture(scope="module", params=CLOUDS)
def cloud(request, tmp_path_factory) -> Iterator[Cloud]:
    needs_extra()
    if request.param == "az":
        with azure.azurite() as port:
            proxy = FaultProxy(port)
            yield Cloud("az", proxy, azure.account(proxy.port))
        return
    with gs.google() as port:
        proxy = FaultProxy(port)
        yield Cloud("gs", proxy, gs.account(proxy.port, tmp_path_factory.mktemp("gs")))


@pytest.fixture
def url(cloud: Cloud) -> Iterator[str]:
    """An empty place in the bucket, and a proxy without faults."""
    cloud.proxy.rule = lambda method, path: None
    with in_environment(cloud.environment):
        yield cloud.empty()


@pytest.fixture(scope="module")
def straight(pool, tmp_path_factory) -> tuple[Path, Any]:
    """An undisturbed run of 4 steps, with a local folder."""
    folder = tmp_path_factory.mktemp("straight")
    ranks = pool.run(run_until, [*SAVING, TO(4)], str(folder), world=2)
    return folder, [rank["state"] for rank in ranks]


@pytest.mark.long
@pytest.mark.parametrize("key", ["folder", "mirror"])
def test_a_run_that_lost_its_disk_goes_on_in_the_same_bits(
    cloud, url, pool, straight, key, tmp_path
):
    argv = [*SAVING, f"--checkpoint.{key}={url}"]
    here = cloud.environment | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    how = str(tmp_path / "run"), None, 60
    pool.run(run_at, here, [*argv, TO(2)], *how, world=2)
    assert whole_steps(url)[-1] == 2
    shutil.rmtree(tmp_path / "run")
    ranks = pool.run(run_at, here, [*argv, TO(4)], *how, world=2)
    assert ranks[0]["begun"] == 2
    assert [rank["state"] for rank in ranks] == straight[1]
    assert whole_steps(url)[-1] == 4


@pytest.mark.long
def test_every_verb_works_there_and_a_copy_comes_back_in_the_same_bytes(
    straight, url, capsys, tmp_path
):
    def tool(*words: object) -> str:
        code = main(["checkpoint", *map(str, words)])
        out = "".join(capsys.readouterr())
        assert code == 0, out
        return out

    saved = straight[0] / "checkpoint"
    assert f"is now in {url}/step-4" in tool("cp", saved / "step-4", url)
    tool("cp", saved / "step-3", url)
    assert tool("verify", url) == f"{url}/step-3: verified\n{url}/step-4: verified\n"
    assert tool("ls", url).count("complete") == 2
    assert tool("show", url).startswith(f"{url}/step-4: step 4")
    assert "the same" in tool("diff", f"{url}/step-4", saved / "step-4")
    tool("cp", url, tmp_path)
    assert contents(tmp_path / "step-4") == contents(saved / "step-4")
    tool("rm", f"{url}/step-3")
    assert committed(place(url)) == [4] and not list_folder(step_folder(place(url), 3))


def test_token_shards_that_were_prepared_there_are_read_as_from_a_folder(
    url, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    (tmp_path / "text.txt").write_text("Words, of which a few repeat. " * 400)
    for out in (f"{url}/shards", str(tmp_path / "shards")):
        assert main(["data", "prepare", str(tmp_path / "text.txt"), "--out", out]) == 0
    here, there = opened(str(tmp_path / "shards")), opened(f"{url}/shards")
    cached = opened(f"{url}/shards", tmp_path / "cache")
    assert ids(here) == ids(there) == ids(cached)
    assert here.fingerprint == there.fingerprint == cached.fingerprint


@pytest.mark.parametrize("size", sample([1 << 20, 40 << 20], 1 << 20))
def test_a_file_that_meets_a_busy_store_and_a_lost_answer_arrives_whole(cloud, url, tmp_path, size):
    content = os.urandom(size)
    (tmp_path / "file").write_bytes(content)
    met = cloud.proxy.fail_once({"status": 503}, {"lose": True})
    copy(tmp_path / "file", place(f"{url}/file"))
    assert read(place(f"{url}/file")) == content
    assert len(met) >= 2


def test_an_upload_whose_last_answer_is_lost_is_there_and_one_that_is_refused_is_not(cloud, url):
    path: Any = place(url) / "file"
    content = os.urandom(20 << 20)
    last = {"gs": "POST uploadId=", "az": "PUT comp=blocklist"}[cloud.scheme]

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

        cloud.proxy.rule = rule
        return failed

    failed = fail(lose=True)
    path.bucket.put(path.key, [content], len(content))
    assert failed and read(path) == content
    fail(status=403)
    with pytest.raises(BucketError, match="file: the credentials do not allow this"):
        path.bucket.put(path.key, [content[::-1]], len(content))
    assert read(path) == content


def test_a_conditional_write_whose_answer_is_lost_is_known_as_its_own(cloud, url):
    path: Any = place(url) / "lease"
    cloud.proxy.fail_once({"lose": True})
    tag = path.bucket.put_if(path.key, b"first")
    assert tag and path.bucket.put_if(path.key, b"another") is None
    cloud.proxy.fail_once({"lose": True})
    assert path.bucket.put_if(path.key, b"second", tag)
    assert path.bucket.put_if(path.key, b"third", tag) is None  # that version is gone
    assert read(path) == b"second"


def test_a_second_run_is_refused_and_one_that_was_paused_commits_nothing(url, monkeypatch):
    monkeypatch.setattr(lease, "_RENEWAL_SECONDS", 2)
    first, second = (Lease(place(url), f"pid {n}", QUIET) for n in (1, 2))
    first.take()
    with pytest.raises(UserError, match="run.lock is held by another run, pid 1;"):
        second.take()
    first._released.set()  # its thread is stopped, as if all of it were
    second.take()
    with pytest.raises(RunFailed, match="pid 2 has taken it"):
        first.confirm()
    second.release()


def test_a_place_is_checked_by_what_a_run_does_there(cloud, url):
    assert check(url, exclusive=True) == "" and list_folder(place(url)) == {}
    if cloud.scheme == "gs":  # to azurite each header is signed
        cloud.proxy.rule = lambda method, path: {"overwrite": True}
        with pytest.raises(BucketError, match=f"^{url}: the store overwrites what it was asked"):
            check(url, exclusive=True)


@pytest.mark.parametrize("case", ["no bucket", "wrong key"])
def test_what_is_wrong_with_a_place_is_one_line(cloud, url, case):
    line, environment = "there is no such bucket", cloud.environment
    if case == "no bucket":
        url = f"{cloud.scheme}://nobody/run"
    elif cloud.scheme == "az":
        environment = environment | {"AZURE_STORAGE_ACCOUNT_KEY": "d3Jvbmc="}
        line = "the credentials do not allow this (or are wrong) (AuthorizationFailure)"
    else:
        cloud.proxy.rule = lambda method, path: {"status": 401}
        line = "the credentials were not accepted (Injected)"
    with in_environment(environment), pytest.raises(BucketError) as caught:
        check(url)
    assert f"{caught.value}".startswith(f"{cloud.scheme}://") and line in f"{caught.value}"
    assert "\n" not in f"{caught.value}"
