"""`titanlite checkpoint export` and `import`: the same bits, of the model that was trained."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

import titanlite
from tests.checkpoint.saved import run_until
from tests.checkpoint.test_load import flip
from tests.jobs import PARROT, TINY
from tests.messages import refused, says
from tests.runs import run as start_run
from tests.tools.conftest import MESH
from titanlite.checkpoint.load import load_tensors
from titanlite.data.tokenizer import ByteTokenizer, load_tokenizer
from titanlite.models import llama3

MODEL = [word for word in [*TINY, *MESH] if word.startswith("--model")]


@pytest.mark.long
def test_an_export_is_imported_as_the_same_bits_and_a_run_starts_from_them(
    saved, tool, tmp_path, pool
):
    hf, back = tmp_path / "hf", tmp_path / "back"
    tool("checkpoint export", saved, hf)
    assert isinstance(load_tokenizer(str(hf)), ByteTokenizer)
    assert {path.name for path in tmp_path.iterdir()} == {"hf"}
    out = tool("generate --checkpoint", hf, code=2)
    assert out.endswith(f"checkpoint import {hf} OUT\n")
    says(tool("checkpoint import", hf, back, *MODEL), "initial_load_path")
    before = load_tensors(saved / "checkpoint/step-3")
    after = load_tensors(back / "step-0")
    assert after.keys() == {name for name in before if name.startswith("model.")}
    assert all(torch.equal(after[name], before[name]) for name in after)
    tool("checkpoint verify", back)
    says(tool("checkpoint export", saved, hf, code=2), hf)
    says(tool("checkpoint import", hf, back, *MODEL, code=2), back)
    deeper = [*MODEL, "--model.overrides.n_layers=3"]
    out = tool("checkpoint import", hf, tmp_path / "other", *deeper, code=2)
    says(out, "model.layers.2.self_attn.q_proj.weight: missing", "num_hidden_layers 2", "has 3")
    assert not (tmp_path / "other").exists()
    argv = [*TINY, *MESH, f"--checkpoint.initial_load_path={back}"]
    argv += ["--model.overrides.rope_theta=2e4"]  # on purpose, a longer wavelength
    argv += ["--checkpoint.exclude_from_loading=['model.overrides.rope_theta']"]
    found = pool.run(run_until, argv, str(tmp_path / "run"), 0, world=4)
    says(found[0]["log"], f"{back}/step-0")


@pytest.mark.long
def test_what_is_written_follows_the_umask(tool, tmp_path):
    """Of a run: metrics, logs, TensorBoard, traces, checkpoints, weights; exports, prepared shards,
    plots, plans.
    """
    folder, text = tmp_path / "run", tmp_path / "a.txt"
    argv = [*TINY, "--checkpoint.enable", "--checkpoint.last_save_in_hf"]
    argv += ["--metrics.enable_tensorboard", "--profiling.enable_profiling"]
    argv += ["--profiling.profile_freq=2", "--profiling.profiler_warmup=0"]
    plain = ("--format", "safetensors")
    before = os.umask(0o027)
    try:
        start_run(argv, folder, real="a fork has the umask of its server")
        text.write_text("The quick brown fox jumps over the lazy dog. " * 5)
        tool("checkpoint export", folder, tmp_path / "hf")
        tool("checkpoint export", folder, tmp_path / "plain", *plain)
        tool("data prepare", text, "--out", tmp_path / "shards")
        tool("plot", folder, "--out", tmp_path / "plot.png")
        tool("plot", folder, "--out", tmp_path / "plot.svg")
        tool("plan --config debug.toml --world=1 --gpu=h100-80g --html", tmp_path / "plan.html")
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    kinds = ".safetensors .log .jsonl .json .toml .bin .npy .png .svg .html".split()
    assert {path.suffix for path in files} >= {*kinds}
    assert [path for path in files if path.stat().st_mode & 0o777 != 0o640] == []


def test_an_export_is_of_the_model_that_was_trained_though_its_flavor_was_edited(
    saved, tool, tmp_path, monkeypatch
):
    edited = replace(llama3.FLAVORS["debugmodel"], rope_theta=5.0)
    monkeypatch.setitem(llama3.FLAVORS, "debugmodel", edited)
    tool("checkpoint export", saved, tmp_path / "hf")
    assert json.loads((tmp_path / "hf/config.json").read_text())["rope_theta"] == 10000.0
    out = tool("generate --config", saved / "config.toml", "--tokens", "1", code=2)
    says(out, "model.overrides.rope_theta: 10000.0", "5.0")


def test_a_damaged_checkpoint_is_not_exported(run, tool, tmp_path):
    for step in (1, 2, 3):
        flip(run / f"checkpoint/step-{step}/rank-0.safetensors", 5000)
    says(tool("checkpoint export", run, tmp_path / "hf", code=2), "rank-0.safetensors")
    assert not (tmp_path / "hf").exists()


@pytest.mark.long
def test_a_model_without_hugging_face_names_is_exported_as_safetensors(pool, tool, tmp_path):
    pool.run(run_until, [*PARROT, "--checkpoint.enable"], str(tmp_path), world=2)
    export = ("checkpoint export", tmp_path, tmp_path / "out")
    out = tool(*export, "--model.package", "parrot", code=2)
    says(out, "parrot", "--format safetensors")
    with refused('package="parrot"'):
        titanlite.load(tmp_path)
    assert titanlite.load(tmp_path, package="parrot")[0]
    tool(*export, "--format", "safetensors", "--dtype=bfloat16")
    (file,) = (tmp_path / "out").glob("*.safetensors")
    found = load_file(file)
    state = load_tensors(tmp_path / "checkpoint/step-3")
    expected = {name: state[name] for name in state if name.startswith("model.")}
    assert {f"model.{name}" for name in found} == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[f"model.{name}"].bfloat16())
