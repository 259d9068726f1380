"""Hugging Face: a bucket is a mirror and a place of token shards, and an export becomes a model, as
far as the client's own requests against a small server show.
"""

from __future__ import annotations

import shutil
import sys
from typing import Any

import numpy as np
import pytest

from tests.jobs import TINY, job
from tests.messages import refused, says
from tests.runs import run
from tests.stores.hub import BUCKET, MODEL, URL, environment
from tests.stores.test_cp import contents
from titanlite.config.load import ConfigError
from titanlite.runtime import bucket
from titanlite.runtime.bucket import place
from titanlite.runtime.store import list_folder, read, write, write_and_sum


def test_the_names_of_a_bucket_are_folders_and_bytes_come_back_as_they_were(hub, monkeypatch):
    monkeypatch.setattr(bucket, "_RANGE", 1 << 20)
    root = place(URL)
    numbers = np.random.default_rng(0).normal(size=1 << 20).astype("float32").tobytes()
    blocks = [numbers[: 1 << 20], numbers[1 << 20 :]]
    assert write_and_sum(root / "step-1" / "a b.bin", blocks, len(numbers))[0] == len(numbers)
    for name, content in {"step-10": b"\xc3\xa9", "step-1x": b"", "latest": b"step-1"}.items():
        write(root / name, content)
        assert read(root / name) == content
    assert hub.content("run/step-1/a b.bin") == read(root / "step-1" / "a b.bin") == numbers
    assert list_folder(root).keys() == {"step-1", "step-10", "step-1x", "latest"}
    assert list_folder(root / "step-1").keys() == {"a b.bin"}
    path: Any = root / "step-1"
    path.remove()
    path.unlink()
    assert list_folder(root).keys() == {"step-10", "step-1x", "latest"}
    with pytest.raises(FileNotFoundError):
        read(root / "step-1" / "a b.bin")


@pytest.mark.parametrize("what", ["xet-write-token", "xorbs", "batch", "tree"])
def test_an_upload_that_is_refused_leaves_no_name_and_is_one_line(what, hub):
    hub.rule = lambda method, path: 403 if what in path else None
    with refused(f"hf://buckets/{BUCKET}", "credentials", kind=bucket.BucketError) as caught:
        bucket.check(URL)
    assert "\n" not in f"{caught.value}" and not hub.files


@pytest.fixture(params=["not there", "wrong token", "offline", "no extra"])
def remedy(request, monkeypatch) -> str:
    """Puts a mistake in; says what is said of it."""
    case = request.param
    if case == "not there":
        monkeypatch.setattr("tests.stores.hub.BUCKET", "me/other")
        return "token"
    if case == "wrong token":
        monkeypatch.setenv("HF_TOKEN", "hf_other")
        return "set HF_TOKEN"
    if case == "offline":
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        return "HF_HUB_OFFLINE is set"
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    return 'pip install "titanlite[hf]"'


def test_what_is_wrong_with_the_hub_is_one_line(hub, remedy, tool, saved):
    with refused("hf://", remedy, kind=bucket.BucketError) as caught:
        bucket.check(URL)
    assert "\n" not in f"{caught.value}" and caught.value.code == 2
    code, out = tool("ls", URL)
    says(out, remedy)
    assert code == 2 and out.count("\n") == 1
    hub.rule = lambda method, path: 401 if "create" in path and remedy == "token" else None
    code, out = tool("export", saved, f"hf://{MODEL}")
    says(out, f"hf://{MODEL}", remedy)
    assert code == 2 and out.count("\n") == 1 and not hub.repos


@pytest.mark.parametrize(
    ("key", "value", "legal"),
    [
        ("folder", URL, "legal: a folder"),
        ("mirror", f"hf://{MODEL}", "hf://buckets/OWNER/NAME/FOLDER"),
        ("mirror", "hf://buckets/me", "hf://buckets/OWNER/NAME/FOLDER"),
        ("initial_load_path", f"hf://{MODEL}", "hf://buckets/OWNER/NAME/FOLDER"),
    ],
)
def test_other_places_of_the_hub_are_refused_with_what_is_legal(key, value, legal):
    with refused(f'checkpoint.{key} = "{value}"', legal, kind=ConfigError):
        job([*TINY, "--checkpoint.enable", f"--checkpoint.{key}={value}"], world=1)


def test_an_export_is_uploaded_as_it_would_be_written_into_a_new_private_model(
    hub, tool, saved, tmp_path
):
    assert tool("export", saved, tmp_path / "hf")[0] == 0
    code, out = tool("export", saved, f"hf://{MODEL}")
    says(out, "step 2", f"hf://{MODEL}")
    expected = contents(tmp_path / "hf")
    assert code == 0 and hub.repos[MODEL] == {".gitattributes": b"", **expected}
    assert hub.private and "model-00001-of-00001.safetensors" in expected
    assert not [*(tmp_path / "user" / "titanlite").iterdir()]
    code, out = tool("export", saved, f"hf://{MODEL}")
    says(out, f"hf://{MODEL} has weights")
    assert code == 2 and hub.repos[MODEL] == {".gitattributes": b"", **expected}
    for other in (f"hf://buckets/{BUCKET}", "hf://model", "s3://bucket/model"):
        code, out = tool("export", saved, other)
        says(out, other, "legal: a folder, or hf://OWNER/NAME")
        assert code == 2


def test_a_damaged_checkpoint_makes_no_model(hub, tool, saved, tmp_path):
    shutil.copytree(saved / "checkpoint/step-2", tmp_path / "step-2")
    weights = tmp_path / "step-2/rank-0.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    code, out = tool("export", tmp_path / "step-2", f"hf://{MODEL}")
    says(out, "rank-0.safetensors")
    assert code == 2 and not hub.repos


def test_a_file_that_is_damaged_in_a_bucket_is_named(hub, tool, saved, tmp_path):
    file = "step-2/rank-1.safetensors"
    assert tool("cp", saved, URL)[0] == 0
    hub.change(f"run/{file}", b"1" + hub.content(f"run/{file}")[1:])
    code, out = tool("export", URL, tmp_path / "damaged")
    says(out, f"{URL}/{file}: damaged")
    assert code == 2 and not (tmp_path / "damaged").exists()


@pytest.mark.long
def test_the_real_command_mirrors_into_a_bucket_or_says_in_a_line_why_not(hub, tmp_path):
    argv = [*TINY, "--checkpoint.enable", f"--checkpoint.mirror={URL}"]
    here: Any = environment(hub.url)
    out = run(argv, tmp_path / "run", **here).out
    says(out, f"step-3 and in {URL}")
    assert "100%" not in out, "no bar of the client"
    here["HF_TOKEN"] = ""
    out = run(argv, tmp_path / "other", code=2, **here).out
    says(out, "checkpoint.mirror", f"hf://buckets/{BUCKET}", "set HF_TOKEN")
    assert len(out.splitlines()) == 2 and not (tmp_path / "other").exists()
