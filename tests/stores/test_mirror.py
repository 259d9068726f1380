"""checkpoint.mirror: a run that lost its folder goes on from there bit for bit, and no fault of the
store stops training or brings a step that is not whole.
"""

from __future__ import annotations

import shutil

import pytest

from tests.messages import refused, says
from tests.runs import records
from tests.stores.runs import lose_the_folder_and_go_on, put, whole_steps
from titanlite.runtime.bucket import place
from titanlite.runtime.store import list_folder
from titanlite.verify.pool import RankFailed

pytestmark = [pytest.mark.long, pytest.mark.parametrize("train", ["mirror"], indirect=True)]
"""What checkpoint.folder and a mirror keep alike is in test_direct.py."""


@pytest.mark.parametrize("store", ["s3", "hub", "gs"], indirect=True)
def test_a_run_that_lost_its_folder_goes_on_from_the_mirror_in_the_same_bits(
    train, straight, store, tmp_path
):
    log = lose_the_folder_and_go_on(train, straight, store.url, tmp_path / "run")
    says(log, f"fetched step 4 from {store.url}")


def test_a_mirror_that_fails_is_a_warning_with_its_lag_and_the_next_start_makes_up_for_it(
    train, store, url, tmp_path
):
    train(2)
    store.proxy.rule = lambda method, path: {"status": 403} if method == "PUT" else None
    _, _, log = train(4)
    says(log, "step 4", "2 steps behind", "training continues")
    lags = [record.get("mirror_steps_behind") or 0 for record in records(tmp_path / "run")]
    assert max(lags) >= 1
    store.proxy.rule = lambda method, path: None
    assert whole_steps(url)[-1] == 2
    put(url, "step-3/rank-0.safetensors", b"begun by a killed run")
    _, begun, log = train(5)
    says(log, "unfinished uploads", "step-3", "mirrored step 4")
    assert begun == 4 and "behind" not in log
    assert whole_steps(url)[-1] == 5 and "step-3" not in list_folder(place(url))


def test_a_step_is_not_deleted_while_it_is_uploaded(train, proxy, url):
    proxy.rule = lambda method, path: {"rate": 100_000} if method == "PUT" else None
    _, _, log = train(12, "--checkpoint.keep_latest_k=1")
    assert "failed" not in log and whole_steps(url)[-1] == 12


@pytest.mark.parametrize("damaged", ["step-4", "step-*"])
def test_a_step_that_is_damaged_in_the_folder_comes_from_the_mirror(
    train, straight, tmp_path, damaged
):
    train(4)
    for file in (tmp_path / "run/checkpoint").glob(f"{damaged}/*.safetensors"):
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    state, begun, log = train(6)
    says(log, "checksum", "fetched step 4")
    assert begun == 4 and state == straight[1]


def test_without_an_answer_a_run_goes_on_only_if_its_folder_has_a_step(train, store, tmp_path):
    train(2)
    store.proxy.rule = lambda method, path: {"status": 503}
    _, begun, log = train(3)
    says(log, store.url, "from the folder")
    assert begun == 2
    shutil.rmtree(tmp_path / "run")
    with refused("checkpoint.mirror", "s3://bucket", kind=RankFailed):
        train(4)


def test_the_mirror_keeps_as_many_steps_as_it_is_told(train, url):
    for steps in (2, 3, 5):
        train(steps, "--checkpoint.mirror_keep_latest_k=1", "--checkpoint.keep_every=2")
    assert [step for step in whole_steps(url) if step % 2] == [5]
    assert 2 in whole_steps(url)
