"""Hugging Face: a bucket is a place of copies and of token shards, and an export becomes a model,
as far as the client's own requests against a small server show.
"""

import shutil
import sys
from typing import Any

import numpy as np
import pytest

from tests.checkpoint.test_huggingface import contents
from tests.messages import refused, says
from tests.stores.hub import BUCKET, MODEL, URL
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
    out = tool("checkpoint ls", URL, code=2)
    says(out, remedy)
    assert out.count("\n") == 1
    hub.rule = lambda method, path: 401 if "create" in path and remedy == "token" else None
    out = tool("checkpoint export", saved, f"hf://{MODEL}", code=2)
    says(out, f"hf://{MODEL}", remedy)
    assert out.count("\n") == 1 and not hub.repos


def test_an_export_is_uploaded_as_it_would_be_written_into_a_new_private_model(
    hub, tool, saved, tmp_path
):
    tool("checkpoint export", saved, tmp_path / "hf")
    says(tool("checkpoint export", saved, f"hf://{MODEL}"), "step 2", f"hf://{MODEL}")
    expected = contents(tmp_path / "hf")
    assert hub.repos[MODEL] == {".gitattributes": b"", **expected}
    assert hub.private and "model-00001-of-00001.safetensors" in expected
    assert not [*(tmp_path / "user" / "titanlite").iterdir()]
    says(tool("checkpoint export", saved, f"hf://{MODEL}", code=2), f"hf://{MODEL} has weights")
    assert hub.repos[MODEL] == {".gitattributes": b"", **expected}
    for other in (f"hf://buckets/{BUCKET}", "hf://model", "s3://bucket/model"):
        out = tool("checkpoint export", saved, other, code=2)
        says(out, other, "legal: a folder, or hf://OWNER/NAME")


def test_a_damaged_checkpoint_makes_no_model(hub, tool, saved, tmp_path):
    shutil.copytree(saved / "checkpoint/step-2", tmp_path / "step-2")
    weights = tmp_path / "step-2/rank-0.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    out = tool("checkpoint export", tmp_path / "step-2", f"hf://{MODEL}", code=2)
    says(out, "rank-0.safetensors")
    assert not hub.repos
