"""checkpoint.mirror: a run that lost its folder goes on from there bit for bit, and no fault of the
store stops training or brings a step that is not whole.
"""

from __future__ import annotations

import os
import shutil
from typing import Any

import pytest

from tests.checkpoint.saved import SAVING, keeping_log
from tests.checkpoint.test_resume import logged
from tests.jobs import trainer
from tests.runs import records
from tests.stores.runs import TO, put, run_at, whole_steps
from tests.stores.server import NOTHING, credentials
from titanlite.runtime import bucket
from titanlite.runtime.bucket import place
from titanlite.runtime.store import list_folder, read
from titanlite.verify.pool import RankFailed


def only_start(port: int, argv: list[str], folder: str) -> list[str]:
    """Start a run on a rank, and end it without a step; return the log."""
    os.environ |= credentials(port)
    bucket._open.cache_clear()
    log, lines = keeping_log()
    run = trainer(argv, folder, log)
    assert run.checkpoints.mirror
    run.checkpoints.mirror.finish(30)
    return lines


@pytest.fixture
def train(pool, proxy, url, tmp_path):
    """Trains to a step on two ranks, with the mirror `url`, in the folder tmp_path / "run"."""

    def train(steps: int, *more: str) -> tuple[list[Any], int, str]:
        argv = [*SAVING, f"--checkpoint.mirror={url}", TO(steps), *more]
        ranks = pool.run(run_at, credentials(proxy.port), argv, str(tmp_path / "run"), world=2)
        return [rank["state"] for rank in ranks], ranks[0]["begun"], "\n".join(ranks[0]["log"])

    return train


def test_a_run_that_lost_its_folder_goes_on_from_the_mirror_in_the_same_bits(
    train, straight, url, tmp_path
):
    train(4)
    assert whole_steps(url)[-1] == 4
    shutil.rmtree(tmp_path / "run")
    state, begun, log = train(6)
    assert begun == 4 and f"fetched step 4 from {url}" in log
    assert state == straight[1]
    assert logged(tmp_path / "run") == logged(straight[0])
    assert whole_steps(url)[-1] == 6
    assert {"metrics.jsonl", "config.toml", "latest"} <= list_folder(place(url)).keys()


@pytest.mark.long
def test_a_flipped_byte_in_the_mirror_is_named_and_the_step_before_is_resumed(
    train, straight, url, tmp_path
):
    train(2)
    train(4)
    file: Any = next(
        path for path in place(f"{url}/step-4").iterdir() if path.name.endswith(".safetensors")
    )
    content = bytearray(read(file))
    content[-1] ^= 1
    put(url, f"step-4/{file.name}", bytes(content))
    shutil.rmtree(tmp_path / "run")
    state, begun, log = train(6)
    assert begun < 4 and f"skipping checkpoint: {file}" in log
    assert "later checkpoints (4) are now set aside" in log
    assert state == straight[1]
    assert 6 in whole_steps(url)


@pytest.mark.long
def test_a_mirror_that_fails_is_a_warning_with_its_lag_and_the_next_start_makes_up_for_it(
    train, pool, proxy, url, tmp_path
):
    train(2)
    proxy.rule = lambda method, path: {"status": 403} if method == "PUT" else None
    _, _, log = train(4)
    assert "step 4 failed on rank 0" in log and "2 steps behind; training continues" in log
    proxy.rule = lambda method, path: None
    assert whole_steps(url)[-1] == 2
    put(url, "step-3/rank-0.safetensors", b"begun by a killed run")
    proxy.rule = lambda method, path: {"rate": 100_000} if method == "PUT" else None
    argv = [*SAVING, f"--checkpoint.mirror={url}", TO(6)]
    log, _ = pool.run(only_start, proxy.port, argv, str(tmp_path / "run"), world=2)
    assert whole_steps(url)[-1] == 4 and "step-3" not in list_folder(place(url))
    assert any("removed unfinished uploads: step-3" in line for line in log)
    assert not any("behind" in line for line in log)


@pytest.mark.long
def test_a_step_is_not_deleted_while_it_is_uploaded(train, proxy, url):
    proxy.rule = lambda method, path: {"rate": 100_000} if method == "PUT" else None
    _, _, log = train(12, "--checkpoint.keep_latest_k=1")
    assert "failed" not in log and whole_steps(url)[-1] == 12


@pytest.mark.long
@pytest.mark.parametrize("damaged", ["step-4", "step-*"])
def test_a_step_that_is_damaged_in_the_folder_comes_from_the_mirror(
    train, straight, url, tmp_path, damaged
):
    train(4)
    for file in (tmp_path / "run/checkpoint").glob(f"{damaged}/*.safetensors"):
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    state, begun, log = train(6)
    assert begun == 4 and "checksum mismatch" in log and "fetched step 4" in log
    assert state == straight[1]


@pytest.mark.long
def test_the_lag_is_in_the_metrics_of_the_saves(train, proxy, tmp_path):
    train(1)
    proxy.rule = lambda method, path: {"status": 403} if method == "PUT" else None
    train(5)
    lags = [each.get("mirror_steps_behind") for each in records(tmp_path / "run")]
    assert max(lag for lag in lags if lag is not None) >= 2


@pytest.mark.long
def test_faults_on_the_way_cost_no_step(train, proxy, url):
    met = proxy.fail_once({"status": 503}, {"lose": True}, {"cut": 9})
    train(3)
    proxy.rule = lambda method, path: None
    assert whole_steps(url)[-1] == 3 and len(met) > 10


@pytest.mark.long
def test_without_an_answer_a_run_goes_on_only_if_its_folder_has_a_step(train, proxy, tmp_path):
    train(2)
    proxy.rule = lambda method, path: {"status": 503}
    _, begun, log = train(3)
    assert begun == 2 and "going on from the folder" in log
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(RankFailed, match="checkpoint.mirror s3://bucket"):
        train(4)


@pytest.mark.long
def test_an_empty_list_is_not_believed(train, proxy, tmp_path):
    train(2)
    shutil.rmtree(tmp_path / "run")
    proxy.rule = lambda method, path: (
        {"status": 200, "text": NOTHING} if "list-type" in path else None
    )
    with pytest.raises(RankFailed, match="lists nothing, but has step-2"):
        train(4)


@pytest.mark.long
def test_the_mirror_keeps_as_many_steps_as_it_is_told(train, url):
    for steps in (2, 3, 5):
        train(steps, "--checkpoint.mirror_keep_latest_k=1", "--checkpoint.keep_every=2")
    assert [step for step in whole_steps(url) if step % 2] == [5]
    assert 2 in whole_steps(url)


@pytest.mark.long
def test_a_rewind_sets_later_steps_aside_and_the_new_ones_take_their_names(
    train, straight, url, tmp_path
):
    train(2)
    train(4)
    shutil.rmtree(tmp_path / "run")
    state, begun, log = train(6, "--checkpoint.load_step=2", "--checkpoint.interval=6")
    assert begun == 2 and "later checkpoints (4) are now set aside" in log.replace("3, 4", "4")
    assert state == straight[1]
    assert [step for step in whole_steps(url) if step > 2] == [6]
