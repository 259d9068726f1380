"""checkpoint.folder in a bucket: a run goes on from there bit for bit, a step is whole or not there
whatever fails, and of two runs in one place one commits.
"""

import shutil
from typing import Any

import pytest

import titanlite
from tests.checkpoint.test_resume import logged
from tests.lanes import sample
from tests.messages import refused, says
from tests.stores.conftest import CLOUDS, whole_steps
from tests.stores.server import NOTHING
from titanlite.checkpoint.load import load_tensors
from titanlite.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from titanlite.checkpoint.owner import ASIDE, Owner
from titanlite.cli import main
from titanlite.errors import RunFailed
from titanlite.runtime.bucket import BucketError, check, place
from titanlite.verify.pool import RankFailed


@pytest.mark.parametrize(
    "store", sample(["s3", "gs", "az", "seaweedfs"], nightly=["az", "seaweedfs"]), indirect=True
)
def test_a_run_that_lost_its_disk_goes_on_from_the_bucket_in_the_same_bits(
    train, straight, url, tmp_path
):
    run = tmp_path / "run"
    train(4)
    assert whole_steps(url)[-1] == 4
    shutil.rmtree(run)
    state, begun, log = train(6)
    assert begun == 4 and state == straight[1] and whole_steps(url)[-1] == 6
    assert logged(run) == logged(straight[0])
    assert {"metrics.jsonl", "config.toml", "latest"} <= place(url).entries().keys()
    says(log, f"step 4 from {url}/step-4")
    assert not any((tmp_path / "cache/titanlite/checkpoints").iterdir())
    assert not (run / "checkpoint").exists()


@pytest.mark.long
def test_a_model_is_loaded_from_a_url_and_generates(train, url, tmp_path, monkeypatch, capsys):
    train(1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    state = titanlite.load(url)[0].state_dict()
    saved = load_tensors(place(f"{url}/step-1"))
    assert state and all(state[name].equal(saved[f"model.{name}"]) for name in state)
    assert main(["generate", "--checkpoint", url, "--tokens", "4"]) == 0
    says("".join(capsys.readouterr()), f"{url}/step-1")
    assert not any((tmp_path / "cache/titanlite/checkpoints").iterdir())


@pytest.mark.long
def test_a_run_starts_from_a_url_and_from_a_dump_folder_that_names_it(train, url, tmp_path):
    train(1)
    shutil.move(tmp_path / "run", tmp_path / "was")
    for start in (url, tmp_path / "was"):
        path = f"--checkpoint.initial_load_path={start}"
        _, begun, log = train(1, path, "--checkpoint.enable=false")
        says(log, f"{url}/step-1")
        assert begun == 0


@pytest.mark.long
def test_a_checkpoint_of_another_mesh_is_read_once_over_all_ranks(train, proxy, url):
    heads = "--model.overrides.n_kv_heads=2"
    before, _, _ = train(2, heads, "--parallelism.tensor_parallel_degree=2", world=4)
    proxy.read.clear()
    state, _, _ = train(3, heads, world=4, stop=2)
    assert state == before
    manifest = read_manifest(place(f"{url}/step-2"))
    tensors = sum(size for path, size in proxy.read.items() if ".safetensors" in path)
    whole = sum(file.size for name, file in manifest.files.items() if "rank-" in name)
    assert whole <= tensors <= 1.05 * whole


@pytest.mark.long
def test_a_flipped_byte_is_named_and_the_step_before_is_resumed(train, straight, url, tmp_path):
    train(2)
    train(4)
    root = place(f"{url}/step-4")
    attempt = read_manifest(root).attempt
    name = next(each for each in (root / attempt).entries() if each.endswith(".safetensors"))
    file = root / attempt / name
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.put(bytes(content))
    shutil.rmtree(tmp_path / "run")
    state, begun, log = train(6)
    says(log, f"skipping checkpoint: {file}", "(4)")
    assert begun < 4 and state == straight[1]
    assert 6 in whole_steps(url)


@pytest.mark.long
def test_faults_on_the_way_cost_no_step(train, proxy, url):
    met = proxy.fail_once({"status": 503}, {"lose": True}, {"cut": 9})
    train(3)
    proxy.heal()
    assert whole_steps(url)[-1] == 3 and len(met) > 10


@pytest.mark.long
def test_a_list_without_the_step_that_latest_names_is_not_believed(train, proxy, url, tmp_path):
    train(3)
    xml = (
        "<?xml version='1.0'?><ListBucketResult><IsTruncated>false</IsTruncated>"
        f"<CommonPrefixes><Prefix>{url.split('/')[3]}/step-1/</Prefix></CommonPrefixes>"
        "</ListBucketResult>"
    )
    for text, lists in ((NOTHING, "nothing"), (xml.encode(), "step-1")):
        shutil.rmtree(tmp_path / "run")
        proxy.fail("list-type", status=200, text=text)
        with refused(f"lists {lists} as the newest", "step-3", kind=RankFailed):
            train(4)


@pytest.mark.long
def test_a_rewind_sets_later_steps_aside_and_the_new_ones_take_their_names(
    train, straight, url, tmp_path
):
    train(2)
    train(4)
    shutil.rmtree(tmp_path / "run")
    state, begun, log = train(6, "--checkpoint.load_step=2", "--checkpoint.interval=6")
    says(log, "4)", "set aside")
    assert begun == 2 and state == straight[1]
    assert [step for step in whole_steps(url) if step > 2] == [6]
    assert ASIDE in place(f"{url}/step-4").entries()


@pytest.mark.long
def test_a_rewind_that_a_store_refused_half_way_is_finished_by_the_next_start(
    train, straight, url, proxy
):
    train(4)
    proxy.fail("PUT .*step-4/manifest.json.aside", status=403)
    with refused("step-4", kind=RankFailed):
        train(6, "--checkpoint.load_step=2")
    proxy.heal()
    state, begun, log = train(6)
    says(log, "4)", "set aside")
    assert begun == 2 and state == straight[1]


def test_a_run_commits_nothing_beside_another_that_has_saved_since_it_started(url):
    root = place(url)

    def save(step, run):
        folder = root / f"step-{step}"
        (folder / MANIFEST).put(Manifest(step, False, {}, {}, run=run).render())

    save(1, "of before")
    first, second = Owner(root, "a"), Owner(root, "b")
    first.require_alone()
    save(2, second.name)
    second.require_alone()
    with refused(f"{url}/step-2", second.name, first.name, kind=RunFailed):
        first.require_alone()
    assert whole_steps(url) == [1, 2]


REFUSED, HANGS = (MANIFEST, {"status": 403}), ("rank-1.safetensors", {"hang": 99})


@pytest.mark.long
@pytest.mark.parametrize(("name", "fault"), [REFUSED, HANGS])
def test_a_save_that_the_store_refuses_or_never_answers_is_absent_and_its_remains_are_removed(
    train, straight, proxy, url, name, fault
):
    train(2)
    proxy.fail(f"PUT .*step-3.*{name}", **fault)
    with refused("step 3 failed on rank", f"{url}/step-3/", name, "step-2", kind=RankFailed):
        train(4, "--checkpoint.stall_timeout_seconds=1")
    assert whole_steps(url) == [1, 2]
    proxy.heal()
    for step in (0, 1, 9):
        left = place(f"{url}/step-{step}/0a1b2c3d/rank-0.safetensors")
        left.put(b"begun by a killed run")
    state, begun, log = train(6)
    says(log, "step-0, step-1/0a1b2c3d\n")
    assert begun == 2 and state == straight[1]
    names = place(url).entries()
    assert "step-0" not in names
    assert "step-9" in names  # it may be of a run in progress


@pytest.mark.long
def test_a_step_whose_manifest_is_stored_stays_whatever_fails_then(train, proxy, url):
    train(2)
    proxy.fail("PUT .*latest", after=1, status=403)  # the first is that of the start
    with refused("step 3 failed", kind=RankFailed):
        train(6)
    proxy.fail(f"PUT .*step-4/{MANIFEST}", lose=True)
    assert whole_steps(url) == [1, 2, 3]
    assert train(4)[1] == 3
    assert whole_steps(url) == [1, 2, 3, 4]


@pytest.mark.parametrize("store", CLOUDS, indirect=True)
def test_of_two_runs_that_save_a_step_one_commits(url):
    target = place(url) / "step-1"
    target.publish(target / "2", MANIFEST, b"of the second run")
    with refused(f"{url}/step-1", kind=FileExistsError):
        target.publish(target / "1", MANIFEST, b"of the first run")


@pytest.mark.parametrize("store", CLOUDS, indirect=True)
def test_a_lost_answer_to_a_conditional_write_is_no_other_writer(store):
    path: Any = place(f"{store.url}/file")
    faults = [{"lose": True}]
    store.proxy.rule = lambda method, path: faults.pop() if method == "PUT" and faults else None
    assert path.bucket.put_if_absent(path.key, b"first") and not faults
    assert not path.bucket.put_if_absent(path.key, b"second")
    assert path.read_bytes() == b"first"


@pytest.mark.parametrize("store", ["s3", "gs"], indirect=True)  # to azurite each header is signed
def test_a_store_that_overwrites_is_refused(store):
    url = store.url
    check(url)
    assert place(url).entries() == {}
    store.proxy.rule = lambda method, path: {"overwrite": True}
    with refused(url, "overwrites", kind=BucketError):
        check(url)
