"""`titanlite checkpoint cp` and the other verbs on object stores: a step is there exactly when its
manifest is, and every copy is verified.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.checkpoint.test_load import flip, plant
from tests.lanes import sample
from tests.messages import says
from tests.stores.server import NOTHING
from titanlite.checkpoint import transfer
from titanlite.checkpoint.manifest import MANIFEST, CorruptCheckpoint, read_manifest
from titanlite.runtime.bucket import place
from titanlite.runtime.store import exists, list_folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


STORES = sample(["s3", "gs", "az", "hub"], "s3")


@pytest.mark.parametrize("store", STORES, indirect=True)
def test_a_copy_to_a_store_and_back_is_the_same_bytes_and_every_verb_reads_it(
    saved, tool, store, tmp_path
):
    url, (first, second) = store.url, (saved / "checkpoint" / f"step-{step}" for step in (1, 2))
    code, out = tool("cp", saved, url)
    says(out, f"{url}/step-2")
    assert code == 0
    if store.name == "s3":
        method, path = store.proxy.log[-1]
        assert method == "PUT" and path.endswith(f"step-2/{MANIFEST}")
    assert tool("cp", first, url)[0] == 0
    assert tool("verify", url) == (0, f"{url}/step-1: verified\n{url}/step-2: verified\n")
    code, out = tool("ls", url)
    assert code == 0 and out.count("complete") == 2 and " ago" in out
    code, out = tool("show", url)
    assert code == 0 and out.startswith(f"{url}/step-2: step 2")
    assert tool("diff", f"{url}/step-1", url) == tool("diff", first, second)
    for name, source in {"ours": url, "theirs": saved}.items():
        assert tool("export", source, tmp_path / name)[0] == 0
    assert contents(tmp_path / "ours") == contents(tmp_path / "theirs")
    assert tool("cp", url, tmp_path / "back")[0] == 0
    assert contents(tmp_path / "back/step-2") == contents(second)
    assert [path.name for path in (tmp_path / "back").iterdir()] == ["step-2"]
    assert not [*(tmp_path / "user").glob("titanlite/*")]
    assert tool("rm", f"{url}/step-1")[0] == 0
    assert list_folder(place(url)).keys() == {"step-2"} and not list_folder(place(f"{url}/step-1"))


def test_a_committed_step_is_never_written_into(saved, tool, url, proxy, tmp_path):
    assert tool("cp", saved, url)[0] == 0
    proxy.log.clear()
    step = saved / "checkpoint/step-2"
    code, out = tool("cp", saved, url)
    says(out, step, f"{url}/step-2 already")
    assert code == 0
    other = shutil.copytree(step, tmp_path / "step-2")
    plant(other, "config.toml", b"# other\n")
    code, out = tool("cp", other, url)
    says(out, f"{url}/step-2 exists", other)
    assert code == 2 and "PUT" not in dict(proxy.log)


def test_a_copy_that_fails_leaves_no_step(saved, tool, url, proxy):
    proxy.rule = lambda method, path: (
        {"status": 403} if method == "PUT" and path.endswith(MANIFEST) else None
    )
    code, out = tool("cp", saved, url)
    says(out, f"{url}/step-2", "credentials")
    assert code == 2
    proxy.rule = lambda method, path: None
    assert list_folder(place(f"{url}/step-2")) and not exists(place(f"{url}/step-2/{MANIFEST}"))
    assert tool("verify", url)[0] == 1
    assert tool("cp", saved, url)[0] == 0
    assert tool("verify", url)[0] == 0


def test_a_damaged_checkpoint_is_not_copied_in_either_direction(saved, tool, url, proxy, tmp_path):
    shutil.copytree(saved / "checkpoint/step-2", tmp_path / "step-2")
    file = next((tmp_path / "step-2").glob("*.safetensors"))
    flip(file, file.stat().st_size - 1)
    code, out = tool("cp", tmp_path, url)
    assert code == 2 and f"{file}: " in out
    assert not exists(place(f"{url}/step-2/{MANIFEST}"))

    assert tool("cp", saved, url)[0] == 0
    proxy.rule = lambda method, path: (
        {"flip": 99} if method == "GET" and path.endswith(f"step-2/{file.name}") else None
    )
    code, out = tool("cp", url, tmp_path / "back")
    assert code == 2 and f"{url}/step-2/{file.name}: " in out
    assert not [*(tmp_path / "back").iterdir()]
    code, out = tool("verify", url)
    assert code == 1 and f"{url}/step-2/{file.name}: checksum" in out


def test_a_step_that_left_its_folder_during_an_upload_gets_no_manifest(saved, url, tmp_path):
    shutil.copytree(saved / "checkpoint/step-2", tmp_path / "step-2")
    source, target = tmp_path / "step-2", place(f"{url}/step-2")
    transfer.begin(source, target)
    transfer.copy_files(source, target, read_manifest(source).files.items())
    source.rename(tmp_path / "archived")
    with pytest.raises(CorruptCheckpoint):
        transfer.end(source, target)
    assert MANIFEST not in list_folder(target)


def test_a_list_that_is_empty_by_mistake_deletes_nothing(saved, tool, url, proxy):
    assert tool("cp", saved, url)[0] == 0
    asked = []
    proxy.rule = lambda method, path: (
        {"status": 200, "text": NOTHING}
        if "list-type" in path and "step-2" in path and (asked.append(path) or len(asked) > 1)
        else None
    )
    assert transfer.remove_leftovers(place(url)) == []
    proxy.rule = lambda method, path: None
    assert tool("verify", url)[0] == 0


def test_rm_takes_the_manifest_first_and_keeps_the_last_step(saved, tool, url, proxy):
    assert tool("cp", saved, url)[0] == 0
    code, out = tool("rm", f"{url}/step-2")
    assert code == 2 and "--force" in out
    assert tool("cp", saved / "checkpoint/step-1", url)[0] == 0
    asked = []
    proxy.rule = lambda method, path: (
        {"status": 403} if method == "POST" and (asked.append(path) or len(asked) > 1) else None
    )
    assert tool("rm", f"{url}/step-1")[0] == 2
    left = list_folder(place(f"{url}/step-1"))
    assert left and MANIFEST not in left
    proxy.rule = lambda method, path: None
    assert tool("rm", f"{url}/step-2", "--force") == (0, f"removed {url}/step-2\n")
    assert list_folder(place(url)).keys() == {"step-1"}
