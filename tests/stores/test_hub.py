"""Hugging Face: a bucket is a mirror and a place of token shards, and an export becomes a model, as
far as the client's own requests against a small server show.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoint.saved import SAVING, run_until
from tests.checkpoint.test_resume import logged
from tests.jobs import TINY, job
from tests.stores.hub import BUCKET, MODEL, Hub, environment, needs_extra, using
from tests.stores.runs import TO, whole_steps
from tests.stores.test_shards import SAMPLES, folder, put, windows
from titanlite.checkpoint.manifest import MANIFEST
from titanlite.cli import main
from titanlite.config.load import ConfigError
from titanlite.runtime import bucket
from titanlite.runtime.bucket import place
from titanlite.runtime.store import list_folder, read, write, write_and_sum

__all__ = ["folder"]
URL = f"hf://buckets/{BUCKET}/run"


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Iterator[Hub]:
    needs_extra()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "user"))
    hub = Hub()
    with using(hub.url):
        yield hub
    hub.close()


@pytest.fixture
def tool(capsys):
    def call(*words: object) -> tuple[int, str]:
        code = main([*map(str, words)])
        return code, "".join(capsys.readouterr())

    return call


def run_at(url: str, argv: list[str], folder: str) -> dict[str, Any]:
    """Train on a rank, with hf:// at a server."""
    with using(url):
        return run_until(argv, folder)


def command(hub: Hub, *arguments: str, **more: str) -> tuple[int, str]:
    result = subprocess.run(
        [sys.executable, "-m", "titanlite", *arguments],
        env={**os.environ, **environment(hub.url), **more},
        capture_output=True,
        text=True,
    )
    return result.returncode, result.stdout + result.stderr


def test_a_run_that_lost_its_folder_goes_on_from_a_bucket_in_the_same_bits(
    pool, hub, straight, tmp_path
):
    def train(steps: int) -> list[dict[str, Any]]:
        argv = [*SAVING, f"--checkpoint.mirror={URL}", TO(steps)]
        return pool.run(run_at, hub.url, argv, str(tmp_path / "run"), world=2)

    train(4)
    assert whole_steps(URL)[-1] == 4
    shutil.rmtree(tmp_path / "run")
    ranks = train(6)
    assert ranks[0]["begun"] == 4 and f"fetched step 4 from {URL}" in "\n".join(ranks[0]["log"])
    assert [rank["state"] for rank in ranks] == straight[1]
    assert logged(tmp_path / "run") == logged(straight[0])
    assert whole_steps(URL)[-1] == 6
    assert {"metrics.jsonl", "config.toml", "latest"} <= list_folder(place(URL)).keys()


@pytest.mark.parametrize("cached", [False, True], ids=["by range", "cached"])
def test_windows_of_shards_in_a_bucket_are_those_of_the_folder(cached, folder, hub, tmp_path):
    put(folder, URL)
    more = [f"--training.dataloader.cache_folder={tmp_path}"] * cached
    local, ours = windows(folder), windows(URL, *more)
    assert ours.fingerprint == local.fingerprint
    assert (ours.__getitems__(range(SAMPLES)) == local.__getitems__(range(SAMPLES))).all()


def test_the_names_of_a_bucket_are_folders_and_bytes_come_back_as_they_were(hub, monkeypatch):
    monkeypatch.setattr(bucket, "_RANGE", 1 << 20)
    root = place(URL)
    numbers = np.random.default_rng(0).normal(size=1 << 20).astype("float32").tobytes()
    blocks = [numbers[: 1 << 20], numbers[1 << 20 :]]
    assert write_and_sum(root / "step-1" / "a b.bin", blocks, len(numbers))[0] == len(numbers)
    for name, content in {"step-10": b"\xc3\xa9", "step-1x": b"", "latest": b"step-1"}.items():
        write(root / name, content)
    assert hub.content("run/step-1/a b.bin") == read(root / "step-1" / "a b.bin") == numbers
    assert read(root / "step-10") == b"\xc3\xa9" and read(root / "step-1x") == b""
    assert list_folder(root).keys() == {"step-1", "step-10", "step-1x", "latest"}
    assert list_folder(root / "step-1").keys() == {"a b.bin"}
    assert list_folder(place(f"hf://buckets/{BUCKET}")).keys() == {"run"}
    path: Any = root / "step-1"
    path.remove()
    path.unlink()
    assert list_folder(root).keys() == {"step-10", "step-1x", "latest"}
    with pytest.raises(FileNotFoundError):
        read(root / "step-1" / "a b.bin")


def test_a_file_that_changes_while_it_is_read_is_named(hub, monkeypatch):
    monkeypatch.setattr(bucket, "_RANGE", 1 << 10)
    path: Any = place(URL) / "file"
    write(path, bytes(3 << 10))
    blocks = path.bucket.blocks(path.key)
    next(blocks)
    hub.change("run/file", b"1" * (3 << 10))
    with pytest.raises(bucket.BucketError, match="run/file changed while it was read"):
        next(blocks)


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("xet-write-token", "the credentials do not allow this (or are wrong)"),
        ("xorbs", "the credentials do not allow this (or are wrong)"),
        ("batch", "the credentials do not allow this (or are wrong)"),
        ("tree", "the credentials do not allow this (or are wrong) (asked to list)"),
    ],
)
def test_an_upload_that_is_refused_leaves_no_name_and_is_one_line(what, line, hub, tool):
    hub.rule = lambda method, path: 403 if what in path else None
    with pytest.raises(bucket.BucketError) as caught:
        bucket.check(URL)
    assert f"{caught.value}".startswith(f"hf://buckets/{BUCKET}: {line}")
    assert "\n" not in f"{caught.value}" and not hub.files


def wrong(case: str, monkeypatch) -> tuple[str, str]:
    """Put a mistake in; return a URL and what is said of it."""
    if case == "not there":
        return "hf://buckets/me/no/run", "there is no such bucket, or not for this token"
    if case == "no token":
        monkeypatch.setenv("HF_TOKEN", "")
        return URL, "no token that is accepted: set HF_TOKEN, or run `hf auth login`"
    if case == "wrong token":
        monkeypatch.setenv("HF_TOKEN", "hf_other")
        return URL, "no token that is accepted"
    if case == "offline":
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        return URL, "HF_HUB_OFFLINE is set"
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    return URL, 'pip install "titanlite[hf]" for Hugging Face'


CASES = ["not there", "no token", "wrong token", "offline", "no extra"]


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_with_a_bucket_is_one_line(case, hub, tool, monkeypatch):
    url, line = wrong(case, monkeypatch)
    with pytest.raises(bucket.BucketError) as caught:
        bucket.check(url)
    assert line in f"{caught.value}" and "\n" not in f"{caught.value}" and caught.value.code == 2
    code, out = tool("checkpoint", "ls", url)
    assert code == 2 and line in out and len(out.splitlines()) == 1


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_with_a_model_of_the_hub_is_one_line(case, hub, tool, saved, monkeypatch):
    _, line = wrong(case, monkeypatch)
    if case == "not there":
        hub.rule = lambda method, path: 403 if "create" in path else None
        line = "the credentials do not allow this (or are wrong)"
    code, out = tool("checkpoint", "export", saved, f"hf://{MODEL}")
    assert code == 2 and f"hf://{MODEL}: {line}" in out and len(out.splitlines()) == 1
    assert not hub.repos


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("folder", URL, "no conditional writes: two runs would mix there; legal: a folder, with"),
        ("mirror", f"hf://{MODEL}", "hf://buckets/OWNER/NAME/FOLDER"),
        ("mirror", "hf://buckets/me", "hf://buckets/OWNER/NAME/FOLDER"),
        ("initial_load_path", f"hf://{MODEL}", "hf://buckets/OWNER/NAME/FOLDER"),
    ],
)
def test_other_places_of_the_hub_are_refused_with_the_reason(key, value, line):
    with pytest.raises(ConfigError) as caught:
        job([*TINY, "--checkpoint.enable", f"--checkpoint.{key}={value}"], world=1)
    assert f'checkpoint.{key} = "{value}"' in str(caught.value) and line in str(caught.value)


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    pool.run(run_until, [*SAVING, TO(2)], str(folder), world=2)
    return folder


def test_an_export_is_uploaded_as_it_would_be_written_into_a_new_private_model(
    hub, tool, saved, tmp_path
):
    assert tool("checkpoint", "export", saved, tmp_path / "hf")[0] == 0
    code, out = tool("checkpoint", "export", saved, f"hf://{MODEL}")
    assert code == 0 and f"exported step 2: hf://{MODEL}\n" in out
    expected = {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()}
    assert hub.repos[MODEL] == {".gitattributes": b"", **expected}
    assert hub.private and "model-00001-of-00001.safetensors" in expected
    assert not [*(tmp_path / "user" / "titanlite").iterdir()]
    code, out = tool("checkpoint", "export", saved, f"hf://{MODEL}")
    assert code == 2 and f"hf://{MODEL} has weights, and an export overwrites nothing" in out
    for other in (f"hf://buckets/{BUCKET}", "hf://model", "s3://bucket/model"):
        code, out = tool("checkpoint", "export", saved, other)
        assert code == 2 and f"{other}: legal: a folder, or hf://OWNER/NAME" in out


def test_a_damaged_checkpoint_makes_no_model(hub, tool, saved, tmp_path):
    shutil.copytree(saved / "checkpoint/step-2", tmp_path / "step-2")
    weights = tmp_path / "step-2/rank-0.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    code, out = tool("checkpoint", "export", tmp_path / "step-2", f"hf://{MODEL}")
    assert code == 2 and "rank-0.safetensors" in out and "nothing was exported" in out
    assert not hub.repos


def test_copies_verbs_export_and_diff_read_a_bucket(hub, tool, saved, tmp_path):
    steps = saved / "checkpoint"
    assert tool("checkpoint", "cp", saved, URL)[0] == 0
    assert tool("checkpoint", "cp", steps / "step-1", URL)[0] == 0
    assert tool("checkpoint", "verify", URL)[0] == 0
    assert tool("checkpoint", "diff", URL, steps / "step-2") == (
        0,
        tool("checkpoint", "diff", steps / "step-2", steps / "step-2")[1],
    )
    assert tool("checkpoint", "diff", f"{URL}/step-1", URL) == tool(
        "checkpoint", "diff", steps / "step-1", steps / "step-2"
    )
    for name, source in {"ours": URL, "theirs": saved}.items():
        code, out = tool("checkpoint", "export", source, tmp_path / name)
        assert code == 0, out
    ours, theirs = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        for name in ("ours", "theirs")
    )
    assert ours == theirs
    assert not [*(tmp_path / "user" / "titanlite").iterdir()]
    hub.change(
        "run/step-2/rank-1.safetensors", b"1" + hub.content("run/step-2/rank-1.safetensors")[1:]
    )
    code, out = tool("checkpoint", "export", URL, tmp_path / "damaged")
    assert code == 2 and f"{URL}/step-2/rank-1.safetensors: damaged" in out
    assert not (tmp_path / "damaged").exists()
    assert tool("checkpoint", "rm", f"{URL}/step-1")[0] == 0
    assert f"run/step-1/{MANIFEST}" not in hub.files and list_folder(place(URL)).keys() == {
        "step-2"
    }


@pytest.mark.exhaustive
def test_the_real_command_mirrors_into_a_bucket_and_resumes_or_says_in_a_line_why_not(
    hub, tmp_path
):
    argv = [
        *TINY,
        "--checkpoint.enable",
        f"--checkpoint.mirror={URL}",
        f"--job.dump_folder={tmp_path}/run",
    ]
    argv = ["train", *argv, "--job.device=cpu", "--checkpoint.interval=2"]
    code, out = command(hub, *argv, "--training.steps=4", NGPU="2")
    assert code == 0 and f"step-4 and in {URL}" in out and "100%" not in out, out
    shutil.rmtree(tmp_path / "run")
    code, out = command(hub, *argv, "--training.steps=6", NGPU="2")
    assert code == 0 and "fetched step 4" in out, out
    for more, line in {
        "HF_TOKEN=": "no token that is accepted: set HF_TOKEN",
        "HF_HUB_OFFLINE=1": "HF_HUB_OFFLINE is set",
    }.items():
        name, _, value = more.partition("=")
        here = {name: value, "NGPU": "1"}
        code, out = command(hub, *argv, f"--job.dump_folder={tmp_path}/other", **here)
        assert code == 2 and f"checkpoint.mirror: hf://buckets/{BUCKET}: {line}" in out, out
        assert (
            "Traceback" not in out and "Retrying" not in out and not (tmp_path / "other").exists()
        )
