"""Text and Hugging Face folders in a store: what is made of them is what a folder gives."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.messages import says
from titanlite.data.shards import MANIFEST
from titanlite.runtime import bucket, store
from titanlite.runtime.bucket import place

TEXTS = {
    "a.txt": b"The quick brown fox.\n" * 300,
    "more/b.jsonl": b"\n".join(json.dumps({"text": f"line {n}"}).encode() for n in range(50)),
    "more/b.jsonl.gz": gzip.compress(b'{"text": "the same, packed"}\n'),
    "more/c.jsonl.gz": gzip.compress(b'{"text": "packed"}\n'),
    "notes.md": b"not read",
    ".hidden/d.txt": b"not read either",
}


@pytest.fixture
def text(url, tmp_path, monkeypatch) -> tuple[Path, str]:
    """The same files in a folder and in a bucket."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    folder = tmp_path / "text"
    for name, content in TEXTS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
        store.write(place(f"{url}/{name}"), content)  # patiently
    monkeypatch.setattr(bucket, "_PATIENCE_SECONDS", 1)
    return folder, url


@pytest.fixture
def prepare(tool) -> Callable[..., str]:
    """Prepares text, requires an exit code, and returns what was printed."""
    return lambda source, out, code=0: tool("data prepare", source, "--out", out, code=code)


def shards(folder: Path) -> dict[str, Any]:
    """Return the files of shards; of the manifest what does not name their source."""
    manifest = json.loads((folder / MANIFEST).read_text())
    kept = ("fingerprint", "content", "tokens", "documents")
    binary = {path.name: path.read_bytes() for path in folder.glob("shard-*")}
    return binary | {key: manifest[key] for key in kept}


def test_shards_of_text_in_a_store_are_those_of_a_folder_and_its_copy_is_gone(
    text, proxy, tmp_path, prepare
):
    folder, url = text
    skipped = "2 skipped: more/b.jsonl.gz, notes.md"
    says(prepare(folder, tmp_path / "here"), skipped)
    says(prepare(url, tmp_path / "there"), f"{url}: {skipped}", f"{url}: 3 files")
    assert shards(tmp_path / "there") == shards(tmp_path / "here")
    assert not [*(tmp_path / "user").rglob("*.txt")]
    proxy.read.clear()
    says(prepare(url, tmp_path / "there"), "already prepared")
    assert not proxy.read
    store.write(place(f"{url}/a.txt"), TEXTS["a.txt"][:-1] + b"!")
    says(prepare(url, tmp_path / "there", code=2), url, "changed")


def test_a_copy_that_was_stopped_goes_on_and_one_file_is_a_source_too(
    text, proxy, tmp_path, prepare
):
    url = text[1]
    proxy.fail("c.jsonl.gz", status=403)
    says(prepare(url, tmp_path / "there", code=2), url, "credentials")
    proxy.heal()
    proxy.read.clear()
    prepare(url, tmp_path / "there")
    assert [path.rpartition("/")[2] for path in proxy.read] == ["c.jsonl.gz"]
    prepare(f"{url}/a.txt", tmp_path / "one")
    prepare(text[0] / "a.txt", tmp_path / "one here")
    assert shards(tmp_path / "one") == shards(tmp_path / "one here")


@pytest.mark.parametrize("case", ["no bucket", "no answer", "nothing"])
def test_what_is_wrong_with_text_in_a_store_is_one_line(
    case, url, proxy, tmp_path, prepare, monkeypatch
):
    monkeypatch.setattr(bucket, "_PATIENCE_SECONDS", 1)
    wrong = "s3://nobody/text" if case == "no bucket" else url
    if case == "no answer":
        proxy.fail("", status=503)
    said = prepare(wrong, tmp_path / "out", code=1 if case == "no answer" else 2)
    says(said, wrong.rpartition("/")[0])
    assert said.count("\n") == 1 and not (tmp_path / "out").exists()


def test_a_hugging_face_folder_is_copied_from_a_store_and_a_killed_copy_mixes_nothing(
    url, proxy, tmp_path, tool
):
    target = tmp_path / "assets/model"
    for name in ("a.safetensors", "config.json", "model.safetensors"):  # of another version
        store.write(place(f"{url}/model/{name}"), b"[]")
    proxy.fail("/model.safe", status=403)
    says(tool("checkpoint cp", f"{url}/model", target, code=2), "s3://bucket", "credentials")
    assert not target.exists() and len([*target.parent.rglob("config.json")]) == 1
    proxy.heal()
    store.delete(place(f"{url}/model/a.safetensors"))
    files = {"config.json": b"{}", "model.safetensors": b"12345678" * 99, "sub/merges.txt": b"a b"}
    for name, content in files.items():
        store.write(place(f"{url}/model/{name}"), content)
    says(tool("checkpoint cp", f"{url}/model", target), f"{url}/model", f"{target}: 3 files")
    here = {path.relative_to(target).as_posix(): path for path in target.rglob("*.*")}
    assert {name: path.read_bytes() for name, path in here.items()} == files
    for there in (target, f"{url}/copy"):
        says(tool("checkpoint cp", f"{url}/model", there, code=2), there, "new folder")
    for name in (".metadata", "__0_0.distcp"):  # of torch's DCP
        store.write(place(f"{url}/theirs/step-4/{name}"), name.encode())
    brought = tmp_path / "step-4"
    says(tool("checkpoint cp", f"{url}/theirs/step-4", brought), f"{brought}: 2 files")
    assert (brought / ".metadata").read_text() == ".metadata"
