"""Text and Hugging Face folders in a store: what is made of them is what a folder gives."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.messages import says
from titanlite.cli import main
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


def prepare(source: object, out: Path) -> int:
    return main(["data", "prepare", str(source), "--out", str(out)])


def shards(folder: Path) -> dict[str, Any]:
    """Return the files of shards; of the manifest what does not name their source."""
    manifest = json.loads((folder / MANIFEST).read_text())
    kept = ("fingerprint", "content", "tokens", "documents")
    binary = {path.name: path.read_bytes() for path in folder.glob("shard-*")}
    return binary | {key: manifest[key] for key in kept}


def test_shards_of_text_in_a_store_are_those_of_a_folder_and_its_copy_is_gone(
    text, proxy, tmp_path, capsys
):
    folder, url = text
    assert prepare(folder, tmp_path / "here") == 0
    skipped = "2 skipped: more/b.jsonl.gz, notes.md"
    says(capsys.readouterr().err, skipped)
    assert prepare(url, tmp_path / "there") == 0
    says(capsys.readouterr().err, f"{url}: {skipped}", f"{url}: 3 files")
    assert shards(tmp_path / "there") == shards(tmp_path / "here")
    assert not [*(tmp_path / "user").rglob("*.txt")]
    proxy.read.clear()
    assert prepare(url, tmp_path / "there") == 0
    says(capsys.readouterr().err, "already prepared")
    assert not proxy.read
    store.write(place(f"{url}/a.txt"), TEXTS["a.txt"][:-1] + b"!")
    assert prepare(url, tmp_path / "there") == 2
    says(capsys.readouterr().err, url, "changed")


def test_a_copy_that_was_stopped_goes_on_and_one_file_is_a_source_too(
    text, proxy, tmp_path, capsys
):
    url = text[1]
    proxy.rule = lambda method, path: {"status": 403} if path.endswith("c.jsonl.gz") else None
    assert prepare(url, tmp_path / "there") == 2
    says(capsys.readouterr().err, url, "credentials")
    proxy.rule = lambda method, path: None
    proxy.read.clear()
    assert prepare(url, tmp_path / "there") == 0
    assert [path.rpartition("/")[2] for path in proxy.read] == ["c.jsonl.gz"]
    assert prepare(f"{url}/a.txt", tmp_path / "one") == 0
    assert prepare(text[0] / "a.txt", tmp_path / "one here") == 0
    assert shards(tmp_path / "one") == shards(tmp_path / "one here")


@pytest.mark.parametrize("case", ["no bucket", "no answer", "nothing"])
def test_what_is_wrong_with_text_in_a_store_is_one_line(
    case, url, proxy, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(bucket, "_PATIENCE_SECONDS", 1)
    wrong = "s3://nobody/text" if case == "no bucket" else url
    if case == "no answer":
        proxy.rule = lambda method, path: {"status": 503}
    assert prepare(wrong, tmp_path / "out") == (1 if case == "no answer" else 2)
    said = capsys.readouterr().err
    says(said, wrong.rpartition("/")[0])
    assert said.count("\n") == 1 and not (tmp_path / "out").exists()


def test_a_hugging_face_folder_is_copied_from_a_store_and_a_killed_copy_mixes_nothing(
    url, proxy, tmp_path, tool
):
    target = tmp_path / "assets/model"
    for name in ("a.safetensors", "config.json", "model.safetensors"):  # of another version
        store.write(place(f"{url}/model/{name}"), b"[]")
    proxy.rule = lambda method, path: {"status": 403} if "/model.safe" in path else None
    code, out = tool("cp", f"{url}/model", target)
    says(out, "s3://bucket", "credentials")
    assert code == 2
    assert not target.exists() and len([*target.parent.rglob("config.json")]) == 1
    proxy.rule = lambda method, path: None
    store.delete(place(f"{url}/model/a.safetensors"))
    files = {"config.json": b"{}", "model.safetensors": b"12345678" * 99, "sub/merges.txt": b"a b"}
    for name, content in files.items():
        store.write(place(f"{url}/model/{name}"), content)
    code, out = tool("cp", f"{url}/model", target)
    says(out, f"{url}/model", f"{target}: 3 files")
    assert code == 0
    here = {path.relative_to(target).as_posix(): path for path in target.rglob("*.*")}
    assert {name: path.read_bytes() for name, path in here.items()} == files
    for there in (target, f"{url}/copy"):
        code, out = tool("cp", f"{url}/model", there)
        says(out, there, "new folder")
        assert code == 2
