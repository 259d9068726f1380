"""`titanlite checkpoint cp` and the other verbs on object stores: a step is there exactly when its
manifest is, and every copy is verified.
"""

import shutil
from typing import Any

import pytest

from tests.checkpoint.test_huggingface import contents
from tests.checkpoint.test_load import flip, plant
from tests.lanes import sample
from tests.messages import says
from tests.stores.server import NOTHING
from titanlite.checkpoint import transfer
from titanlite.checkpoint.manifest import MANIFEST, read_manifest
from titanlite.checkpoint.owner import ASIDE, Owner
from titanlite.runtime.bucket import place

STORES = sample(["s3", "gs", "az"], "s3")


@pytest.mark.parametrize("store", STORES, indirect=True)
def test_a_copy_to_a_store_and_back_is_the_same_bytes_and_every_verb_reads_it(
    saved, tool, store, tmp_path
):
    url, (first, second) = store.url, (saved / "checkpoint" / f"step-{step}" for step in (1, 2))
    says(tool("checkpoint cp", saved, url), f"{url}/step-2")
    if store.name == "s3":
        *_, manifest, latest = (path for method, path in store.proxy.log if method == "PUT")
        assert manifest.endswith(f"step-2/{MANIFEST}") and latest.endswith("/latest")
    tool("checkpoint cp", first, url)
    verified = f"{url}/step-1: verified\n{url}/step-2: verified\n"
    assert tool("checkpoint verify", url) == verified
    listed = tool("checkpoint ls", url)
    assert listed.count("complete") == 2 and " ago" in listed
    assert tool("checkpoint show", url).startswith(f"{url}/step-2: step 2")
    theirs = tool("checkpoint diff", first, second, code=1)
    assert tool("checkpoint diff", f"{url}/step-1", url, code=1) == theirs
    for name, source in {"ours": url, "theirs": saved}.items():
        tool("checkpoint export", source, tmp_path / name)
    assert contents(tmp_path / "ours") == contents(tmp_path / "theirs")
    tool("checkpoint cp", url, tmp_path / "back")
    back = tmp_path / "back/checkpoint"  # where a run in back looks
    assert contents(back / "step-2") == contents(second)
    assert {path.name for path in back.iterdir()} == {"step-2", "latest"}
    assert "already" in tool("checkpoint cp", url, back.parent, "--all")
    assert contents(back / "step-1") == contents(first)
    assert not [*(tmp_path / "user").glob("titanlite/*")]


def test_a_committed_step_is_never_written_into(saved, tool, url, proxy, tmp_path):
    tool("checkpoint cp", saved, url)
    proxy.log.clear()
    step = saved / "checkpoint/step-2"
    says(tool("checkpoint cp", saved, url), step, f"{url}/step-2 already")
    other = shutil.copytree(step, tmp_path / "step-2")
    plant(other, "config.toml", b"# other\n")
    says(tool("checkpoint cp", other, url, code=2), f"{url}/step-2 exists", other)
    assert "PUT" not in dict(proxy.log)


def test_a_copy_that_fails_leaves_no_step(saved, tool, url, proxy):
    proxy.fail(f"PUT .*{MANIFEST}", status=403)
    says(tool("checkpoint cp", saved, url, code=2), f"{url}/step-2", "credentials")
    proxy.heal()
    assert place(f"{url}/step-2").entries() and not place(f"{url}/step-2/{MANIFEST}").exists()
    tool("checkpoint verify", url, code=1)
    tool("checkpoint cp", saved, url)
    tool("checkpoint verify", url)


def test_a_damaged_checkpoint_is_not_copied_in_either_direction(saved, tool, url, proxy, tmp_path):
    shutil.copytree(saved / "checkpoint/step-2", tmp_path / "step-2")
    file = next((tmp_path / "step-2").glob("*.safetensors"))
    flip(file, file.stat().st_size - 1)
    says(tool("checkpoint cp", tmp_path, url, code=2), f"{file}: ")
    assert not place(f"{url}/step-2/{MANIFEST}").exists()

    tool("checkpoint cp", saved, url)
    attempt = read_manifest(place(f"{url}/step-2")).attempt
    proxy.fail(f"GET .*step-2/{attempt}/{file.name}", flip=99)
    back = tool("checkpoint cp", url, tmp_path / "back", code=2)
    says(back, f"{url}/step-2/{attempt}/{file.name}: ")
    assert not [*(tmp_path / "back").glob("**/*step-*")]
    says(tool("checkpoint verify", url, code=1), f"{url}/step-2/{attempt}/{file.name}: checksum")


def test_a_step_that_left_its_folder_during_an_upload_gets_no_manifest(
    saved, tool, url, tmp_path, monkeypatch
):
    source = shutil.copytree(saved / "checkpoint/step-2", tmp_path / "step-2")
    copy_files = transfer.copy_files

    def copy_and_move(*arguments: Any) -> None:
        copy_files(*arguments)
        source.rename(tmp_path / "archived")

    monkeypatch.setattr(transfer, "copy_files", copy_and_move)
    says(tool("checkpoint cp", source, url, code=2), source)
    assert place(f"{url}/step-2").entries() and not place(f"{url}/step-2/{MANIFEST}").exists()


@pytest.mark.long
def test_a_list_that_is_empty_by_mistake_deletes_nothing(saved, tool, url, proxy):
    tool("checkpoint cp", saved, url)
    proxy.fail("(?=.*list-type).*step-2", after=1, status=200, text=NOTHING)
    assert Owner(place(url), "here").remove_leftovers() == []
    proxy.heal()
    tool("checkpoint verify", url)


def test_steps_that_a_rewind_has_set_aside_are_no_leftovers(saved, tool, url):
    tool("checkpoint cp", saved, url, "--all")
    root = place(url)
    Owner(root, "here").set_aside([1])
    assert Owner(root, "here").remove_leftovers() == []
    assert ASIDE in (root / "step-1").entries()


def test_a_hugging_face_folder_is_copied_whole_or_not_at_all(url, proxy, tmp_path, tool):
    target = tmp_path / "assets/model"
    files = {"config.json": b"{}", "model.safetensors": b"12345678" * 99, "sub/merges.txt": b"a b"}
    for name, content in files.items():
        place(f"{url}/model/{name}").put(content)
    proxy.fail("/model.safe", status=403)
    says(tool("checkpoint cp", f"{url}/model", target, code=2), "s3://bucket", "credentials")
    assert not [*target.parent.iterdir()]
    proxy.heal()
    says(tool("checkpoint cp", f"{url}/model", target), f"{url}/model", target)
    here = {path.relative_to(target).as_posix(): path for path in target.rglob("*.*")}
    assert {name: path.read_bytes() for name, path in here.items()} == files
    for there in (target, f"{url}/copy"):
        says(tool("checkpoint cp", f"{url}/model", there, code=2), there, "folder here")
    for name in (".metadata", "__0_0.distcp"):  # of torch's DCP
        place(f"{url}/theirs/step-4/{name}").put(name.encode())
    brought = tmp_path / "step-4"
    tool("checkpoint cp", f"{url}/theirs/step-4", brought)
    assert (brought / ".metadata").read_text() == ".metadata"
