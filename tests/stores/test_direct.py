"""checkpoint.folder in a bucket: a run goes on from there bit for bit, a step is whole or not there
whatever fails, and of two runs in one place one commits.
"""

from __future__ import annotations

import json
import shutil
import time
from typing import Any

import pytest

import titanlite
from tests.checkpoint.saved import SAVING, keeping_log
from tests.checkpoint.test_resume import logged
from tests.lanes import sample
from tests.stores.runs import QUIET, TO, put, run_at, whole_steps
from tests.stores.server import NOTHING, credentials
from titanlite.checkpoint import lease, transfer
from titanlite.checkpoint.folder import CheckpointFolder
from titanlite.checkpoint.lease import LEASE, Lease
from titanlite.checkpoint.load import load_tensors
from titanlite.checkpoint.manifest import MANIFEST, read_manifest
from titanlite.errors import RunFailed, UserError
from titanlite.runtime import store
from titanlite.runtime.bucket import BucketError, check, place
from titanlite.runtime.store import list_folder, read
from titanlite.verify.pool import RankFailed


@pytest.fixture
def train(pool, proxy, url, tmp_path):
    """Trains to a step on two ranks, with checkpoints at `url`, in the folder tmp_path / "run"."""

    def train(
        steps: int, *more: str, world: int = 2, stop: int | None = None
    ) -> tuple[list[Any], int, str]:
        argv = [*SAVING, f"--checkpoint.folder={url}", TO(steps), *more]
        here = credentials(proxy.port) | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
        ranks = pool.run(run_at, here, argv, str(tmp_path / "run"), stop, world=world)
        return [rank["state"] for rank in ranks], ranks[0]["begun"], "\n".join(ranks[0]["log"])

    return train


def holder(url: str) -> str:
    return json.loads(read(place(url) / LEASE))["holder"]


def test_a_run_that_lost_its_disk_goes_on_from_the_bucket_in_the_same_bits(
    train, straight, url, tmp_path
):
    train(4)
    assert whole_steps(url)[-1] == 4 and holder(url) == ""
    shutil.rmtree(tmp_path / "run")
    state, begun, log = train(6)
    assert begun == 4 and f"resumed step 4 from {url}/step-4" in log
    assert state == straight[1]
    assert logged(tmp_path / "run") == logged(straight[0])
    assert whole_steps(url)[-1] == 6
    assert {"metrics.jsonl", "config.toml", "latest"} <= list_folder(place(url)).keys()
    assert not any((tmp_path / "cache/titanlite/checkpoints").iterdir())
    assert not (tmp_path / "run/checkpoint").exists()


def test_a_model_is_loaded_from_a_url(train, url, tmp_path, monkeypatch):
    train(1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model, _ = titanlite.load(url)
    saved = load_tensors(place(f"{url}/step-1"))
    state = model.state_dict()
    assert state and all(state[name].equal(saved[f"model.{name}"]) for name in state)
    assert not any((tmp_path / "cache/titanlite/checkpoints").iterdir())


def test_a_run_starts_from_a_url_and_from_a_dump_folder_that_names_it(train, url, tmp_path):
    train(1)
    shutil.move(tmp_path / "run", tmp_path / "was")
    for start in (url, tmp_path / "was"):
        path = f"--checkpoint.initial_load_path={start}"
        _, begun, log = train(1, path, "--checkpoint.enable=false")
        assert begun == 0 and f"loaded weights from {url}/step-1" in log


@pytest.mark.long
def test_a_checkpoint_of_another_mesh_is_read_once_over_all_ranks(pool, proxy, url, tmp_path):
    argv = [*SAVING, "--model.overrides.n_kv_heads=2", f"--checkpoint.folder={url}", TO(2)]
    saved = [*argv, "--parallelism.tensor_parallel_degree=2"]
    here = credentials(proxy.port) | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    run = str(tmp_path / "run")
    before = pool.run(run_at, here, saved, run, world=4)[0]["state"]
    proxy.read.clear()
    ranks = pool.run(run_at, here, [*argv, TO(3)], run, 2, world=4)
    assert ranks[0]["state"] == before
    manifest = read_manifest(place(f"{url}/step-2"))
    tensors = sum(size for path, size in proxy.read.items() if ".safetensors" in path)
    whole = sum(file.size for name, file in manifest.files.items() if "rank-" in name)
    assert whole <= tensors <= 1.05 * whole


@pytest.mark.long
def test_a_flipped_byte_is_named_and_the_step_before_is_resumed(train, straight, url):
    train(2)
    train(4)
    root = place(f"{url}/step-4")
    file: Any = root / read_manifest(root).attempt / "rank-0.safetensors"
    content = bytearray(read(file))
    content[-1] ^= 1
    file.bucket.put(file.key, [bytes(content)], len(content))
    state, begun, log = train(6)
    assert begun == 3 and f"skipping checkpoint: {file}: damaged" in log
    assert "later checkpoints (4) are now set aside" in log
    assert state == straight[1]
    assert 6 in whole_steps(url)


@pytest.mark.long
def test_faults_on_the_way_cost_no_step(train, proxy, url):
    met = proxy.fail_once({"status": 503}, {"lose": True}, {"cut": 9})
    train(3)
    proxy.rule = lambda method, path: None
    assert whole_steps(url)[-1] == 3 and len(met) > 10


@pytest.mark.parametrize(
    ("name", "fault"),
    sample(
        [
            (MANIFEST, {"status": 403}),
            ("rank-1.safetensors", {"hang": 99}),
            ("state.json", {"status": 403}),
        ],
        every=3,
    ),
)
def test_a_save_that_the_store_refuses_is_absent_and_its_remains_are_removed(
    train, straight, proxy, url, name, fault
):
    """Or that it never answers."""
    train(2)
    proxy.rule = lambda method, path: (
        fault if method == "PUT" and "step-3" in path and name in path else None
    )
    named = rf"step 3 failed on rank [01]: {url}/step-3/.*{name}.*step-2"
    with pytest.raises(RankFailed, match=named):
        train(4, "--checkpoint.stall_timeout_seconds=1")
    assert whole_steps(url) == [1, 2]
    proxy.rule = lambda method, path: None
    put(url, "step-9/0a1b2c3d/rank-0.safetensors", b"begun by a killed run")
    state, begun, log = train(6)
    assert begun == 2 and state == straight[1]
    assert "what an interrupted save left: step-3, step-9" in log
    assert "step-9" not in list_folder(place(url))


@pytest.mark.long
def test_a_step_whose_manifest_is_stored_stays_whatever_fails_then(train, proxy, url):
    train(2)
    first = iter([None])  # that of the start
    proxy.rule = lambda method, path: (
        next(first, {"status": 403}) if method == "PUT" and path.endswith("latest") else None
    )
    with pytest.raises(RankFailed, match="step 3 failed"):
        train(6)
    proxy.rule = lambda method, path: (
        {"lose": True} if method == "PUT" and path.endswith(f"step-4/{MANIFEST}") else None
    )
    assert whole_steps(url) == [1, 2, 3]
    assert train(4)[1] == 3
    assert whole_steps(url) == [1, 2, 3, 4]


@pytest.mark.long
def test_an_empty_list_is_not_believed(train, proxy, tmp_path):
    train(2)
    proxy.rule = lambda method, path: (
        {"status": 200, "text": NOTHING} if "list-type" in path else None
    )
    with pytest.raises(RankFailed, match="lists nothing, but has step-2"):
        train(4)


@pytest.mark.long
def test_old_steps_are_deleted_and_a_rewind_sets_later_ones_aside(train, straight, url):
    train(4, "--checkpoint.keep_latest_k=2")
    assert whole_steps(url) == [3, 4]
    state, begun, log = train(6, "--checkpoint.load_step=3")
    assert begun == 3 and "later checkpoints (4) are now set aside" in log
    assert state == straight[1] and whole_steps(url) == [3, 4, 5, 6]
    assert transfer.ASIDE in list_folder(place(f"{url}/step-4"))


@pytest.fixture
def fast(monkeypatch) -> None:
    monkeypatch.setattr(lease, "_RENEWAL_SECONDS", 1)


def test_a_second_run_is_refused_while_the_first_renews_its_lease(fast, url):
    root = place(url)
    first, second = Lease(root, "pid 1 on a", QUIET), Lease(root, "pid 2 on b", QUIET)
    first.take()
    with pytest.raises(UserError, match=r"run.lock is held by another run, pid 1 on a;"):
        second.take()
    first.release()
    began = time.monotonic()
    second.take()
    assert time.monotonic() - began < 1 and holder(url) == "pid 2 on b"
    again = Lease(root, "pid 2 on b", QUIET)  # the next attempt of the same launcher
    again.take()
    with pytest.raises(RunFailed, match="pid 2 on b has taken it"):
        second.confirm()
    second._released.set()
    again.release()


def test_a_slow_store_takes_no_lease_from_a_run_that_renews_it(fast, url):
    first, second = (Lease(place(url), f"pid {n}", QUIET) for n in (1, 2))
    first.take()
    read_lease, reads = second._read, iter([0, 4])

    def read_slowly() -> tuple[str, Any]:
        time.sleep(next(reads))
        return read_lease()

    second._read = read_slowly  # type: ignore[method-assign]
    with pytest.raises(UserError, match="is held by another run, pid 1"):
        second.take()
    first.release()


def test_a_run_that_was_paused_beyond_its_lease_commits_nothing(fast, url, monkeypatch):
    root, (log, lines) = place(url), keeping_log()
    paused, next_run = Lease(root, "pid 1 on a", QUIET), Lease(root, "pid 2 on b", log)
    paused.take()
    paused._released.set()  # its thread is stopped, as all of it is
    next_run.take()
    assert "waiting 3 s to see if pid 1 on a is still up" in lines[0]
    with pytest.raises(RunFailed, match="pid 2 on b has taken it"):
        paused.confirm()
    folder = CheckpointFolder.__new__(CheckpointFolder)
    folder.lease = paused
    with pytest.raises(RunFailed, match="pid 2 on b has taken it"):
        folder.note(1)  # after which old steps are deleted
    target = root / "step-1"
    store.publish(target / "1", target, MANIFEST, b"of the second run")
    with pytest.raises(FileExistsError, match="was put there by another run"):
        store.publish(target / "2", target, MANIFEST, b"of the first run")
    next_run.release()


@pytest.mark.parametrize("fault", [{"lose": True}, {"cut": 9}, {"status": 503}])
def test_a_lost_answer_to_a_conditional_write_is_no_other_writer(proxy, url, fault):
    path: Any = place(f"{url}/{LEASE}")
    faults = [fault, None, fault]
    proxy.rule = lambda method, path: faults.pop() if method == "PUT" and faults else None
    tag = path.bucket.put_if(path.key, b"first")
    assert path.bucket.put_if(path.key, b"second") is None
    assert path.bucket.put_if(path.key, b"second", tag) not in (None, tag)
    assert path.bucket.put_if(path.key, b"third", tag) is None
    assert read(path) == b"second"


def test_a_store_that_overwrites_is_refused(proxy, url):
    check(url, exclusive=True)
    proxy.rule = lambda method, path: {"overwrite": True}
    with pytest.raises(BucketError, match="overwrites what it was asked to keep"):
        check(url, exclusive=True)
    check(url)  # a mirror does without
