"""`titanlite checkpoint …` and `generate` on a checkpoint of another mesh, in one process without
process groups.
"""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import titanlite
from tests.checkpoint.saved import SAVING, keeping_log, run_until, steps_in
from tests.checkpoint.test_load import flip, plant
from tests.data.assets import make_assets
from tests.jobs import PARROT, TINY, trainer
from tests.lanes import sample
from tests.runs import train
from tests.tools.test_plot import record
from titanlite.checkpoint.load import load_tensors
from titanlite.checkpoint.manifest import read_manifest
from titanlite.cli import main
from titanlite.data.tokenizer import ByteTokenizer, load_tokenizer
from titanlite.errors import UserError
from titanlite.models import llama3
from titanlite.tools import tour
from titanlite.tools.evaluate import Counted
from titanlite.tools.generate import Show, narrowing
from titanlite.train.generate import _sample

TEXT = "The quick brown fox jumps over the lazy dog. " * 5
MESH = ["--model.overrides.n_kv_heads=2", "--parallelism.tensor_parallel_degree=2"]


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory) -> Path:
    """A run of FSDP 2 x tensor parallel 2 with step-1, step-2 and step-3, which validates at the
    end.
    """
    folder = tmp_path_factory.mktemp("tools")
    (folder / "held.txt").write_text(TEXT)
    held_out = [
        "--validation.enable",
        "--validation.dataset=text",
        f"--validation.dataset_path={folder}/held.txt",
    ]
    pool.run(run_until, [*SAVING, *MESH, *held_out], str(folder), world=4)
    return folder


@pytest.fixture
def run(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


@pytest.fixture
def tool(capsys):
    """Runs a verb: exit code, and what was printed."""

    def call(*words: object) -> tuple[int, str]:
        code = main([str(word) for word in words])
        assert not dist.is_initialized()
        out = capsys.readouterr()
        return code, out.out + out.err

    return call


def test_ls_shows_steps_meshes_and_damage(run, tool):
    os.truncate(run / "checkpoint/step-2/rank-1.safetensors", 5)
    flip(run / "checkpoint/step-1/rank-0.safetensors", 5000)
    (run / "checkpoint/step-x").mkdir()
    code, out = tool("checkpoint", "ls", run)
    rows = out.splitlines()
    assert code == 0 and len(rows) == 4
    assert (
        "dp_shard 2, tp 2" in rows[1]
        and rows[1].endswith("complete")
        and rows[3].endswith("complete")
    )
    assert (
        rows[2].startswith("step-2")
        and "damaged: " in rows[2]
        and "rank-1.safetensors: 5 bytes" in rows[2]
    )
    code, out = tool("checkpoint", "ls", run / "checkpoint", "--full")
    assert "damaged" in out.splitlines()[1] and out.splitlines()[3].endswith("verified")


def test_verify_reads_every_byte(run, tool):
    assert tool("checkpoint", "verify", run)[0] == 0
    flip(run / "checkpoint/step-3/rank-2.safetensors", 5000)
    code, out = tool("checkpoint", "verify", run)
    assert (
        code == 1 and "step-2: verified" in out and "rank-2.safetensors: checksum mismatch" in out
    )
    assert tool("checkpoint", "verify", run / "checkpoint/step-2")[0] == 0


def test_help_says_whether_all_checkpoints_of_a_folder_are_taken_or_the_latest(tool):
    for verb in ("ls", "verify", "show", "export", "cp"):
        out = " ".join(tool("checkpoint", verb, "--help")[1].split())
        assert ("or all of a folder" in out) == (verb in ("ls", "verify"))
        assert ("or the latest complete one of a folder" in out) == (verb not in ("ls", "verify"))
        assert ("; default: outputs" in out) == (verb == "ls")


def test_a_copy_that_is_there_is_success_and_another_step_of_its_number_is_kept(run, tool):
    step, copies = run / "checkpoint/step-2", run / "copies"
    code, out = tool("checkpoint", "cp", step, copies)
    assert code == 0 and out.endswith("verified\n")
    written = (copies / "step-2").stat().st_ino
    code, out = tool("checkpoint", "cp", step, copies)
    assert code == 0 and out == f"{step} is in {copies}/step-2 already, by its manifest and sizes\n"
    content = (step / "config.toml").read_bytes()
    plant(step, "config.toml", content + b"# another\n")
    refused = f"{copies}/step-2 exists, and is no copy of {step}; name another folder"
    assert tool("checkpoint", "cp", step, copies) == (2, f"titanlite: {refused}\n")
    plant(step, "config.toml", content)
    assert tool("checkpoint", "cp", step, copies)[0] == 0
    os.truncate(copies / "step-2/rank-1.safetensors", 5)
    assert tool("checkpoint", "cp", step, copies) == (2, f"titanlite: {refused}\n")
    assert (copies / "step-2").stat().st_ino == written


def test_a_step_under_another_name_is_named_and_never_resumed(run, tool, pool):
    shutil.copytree(run / "checkpoint/step-2", run / "checkpoint/step-9")
    said = f"{run}/checkpoint/step-9: a copy of step 2 under another name"
    code, out = tool("checkpoint", "ls", run)
    assert code == 0 and out.splitlines()[4].endswith(f"damaged: {said}")
    code, out = tool("checkpoint", "verify", run)
    assert code == 1 and said in out and "step-3: verified" in out
    code, out = tool("checkpoint", "show", run / "checkpoint/step-9")
    assert code == 2 and said in out
    for rank in pool.run(run_until, [*SAVING, *MESH, "--training.steps=4"], str(run), world=4):
        assert rank["begun"] == 3 and f"skipping checkpoint: {said}" in rank["log"]
    assert steps_in(run) == ["step-1", "step-2", "step-3", "step-4"]
    assert (next(run.glob("previous/*")) / "checkpoint/step-9/manifest.json").exists(), (
        "moved, not deleted"
    )


def starts(argv: list[str], folders: list[str]) -> list[tuple[int, list[str]]]:
    """Return the step at which a run in each folder starts, and its log."""
    found = []
    for folder in folders:
        log, lines = keeping_log()
        found.append((trainer(argv, folder, log).step, lines))
    return found


@pytest.mark.parametrize("content", ["missing", "empty", "another step's", "a folder"])
def test_a_file_that_is_not_the_steps_own_is_named_and_the_step_is_skipped(
    saved, tool, tmp_path, pool, content
):
    names = [
        "manifest.json",
        "config.toml",
        "state.json",
        "environment.json",
        "rank-0.safetensors",
    ]
    if content == "another step's":  # some are the same in both
        first, second = (saved / f"checkpoint/step-{step}" for step in (2, 3))
        names = [
            name for name in names if (first / name).read_bytes() != (second / name).read_bytes()
        ]
    folders = []
    for name in names:
        run = Path(shutil.copytree(saved, tmp_path / name))
        folders.append(str(run))
        file = run / "checkpoint/step-3" / name
        file.unlink()
        if content == "a folder":
            file.mkdir()
        elif content != "missing":
            file.write_bytes(
                b"" if content == "empty" else (run / "checkpoint/step-2" / name).read_bytes()
            )
        hidden = (
            content == "another step's" and name == "rank-0.safetensors"
        )  # it has the same size: every byte is read
        for words in (
            ("ls", run),
            ("ls", run, "--full"),
            ("verify", run),
            ("show", run / "checkpoint/step-3"),
        ):
            code, out = tool("checkpoint", *words)
            if words[1:] == (run,) and words[0] == "ls" and hidden:
                continue
            if words[0] != "show" or not hidden:
                assert code == {"ls": 0, "verify": 1, "show": 2}[words[0]], (name, words, out)
                assert "step-3" in out and (name in out or "a copy of step 2" in out), (
                    name,
                    words,
                    out,
                )
    for name, (step, log) in zip(
        names, pool.run(starts, [*SAVING, *MESH[:1]], folders, world=1)[0], strict=True
    ):
        (line,) = [line for line in log if line.startswith("skipping checkpoint: ")]
        assert step == 2 and "step-3" in line and (name in line or "a copy of step 2" in line), line
        assert any("later checkpoints (3) are now in" in line for line in log), (
            "its number is free again"
        )


def test_of_a_linked_step_the_link_is_removed_and_the_target_stays_whole(run, tool, pool, tmp_path):
    archive = tmp_path / "archive"
    archive.mkdir()
    for step in (1, 2, 3):
        path = run / f"checkpoint/step-{step}"
        shutil.move(path, archive / path.name)
        path.symlink_to(archive / path.name)
    before = {path: path.stat().st_size for path in archive.rglob("*")}
    assert tool("checkpoint", "rm", run / "checkpoint/step-1") == (
        0,
        f"removed {run}/checkpoint/step-1\n",
    )
    argv = [*SAVING, *MESH, "--checkpoint.keep_latest_k=1", "--training.steps=4"]
    assert pool.run(run_until, argv, str(run), world=4)[0]["begun"] == 3, "a link is resumed"
    assert steps_in(run) == ["step-4"] and [*(run / "checkpoint").glob(".*")] == []
    assert {path: path.stat().st_size for path in archive.rglob("*")} == before
    assert tool("checkpoint", "verify", archive)[0] == 0


def test_no_deletion_follows_a_link_at_any_level(run, pool, tmp_path):
    """The dump folder, the checkpoints' folder, a step, a file of a step, what killed saves left,
    earlier files.
    """
    archive = tmp_path / "archive"

    def move(path: Path) -> None:
        """Put a link in the place of what is archived."""
        target = archive / path.relative_to(run)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(path, target)
        path.symlink_to(target)

    left = [
        f"checkpoint/{name}"
        for name in (".step-7.0123abcd.staging", ".step-8.deleted", "hf-step-4")
    ]
    for name in (*left, "checkpoint/.hf-step-4.replaced", "previous"):
        (run / name).mkdir()
        (run / name / "kept").touch()
        move(run / name)
    for name in ("step-1", "step-2/rank-0.safetensors", "step-3/rank-1.safetensors", "latest"):
        move(run / "checkpoint" / name)
    before = {path: path.read_bytes() for path in archive.rglob("*") if path.is_file()}
    disk = tmp_path / "disk"
    shutil.move(run / "checkpoint", disk)
    (run / "checkpoint").symlink_to(disk)
    (tmp_path / "entry").symlink_to(run)
    argv = [
        *SAVING,
        *MESH,
        "--checkpoint.keep_latest_k=1",
        "--training.steps=4",
        "--checkpoint.last_save_in_hf",
    ]
    assert pool.run(run_until, argv, f"{tmp_path}/entry", world=4)[0]["begun"] == 3
    assert sorted(path.name for path in disk.iterdir()) == ["hf-step-4", "latest", "step-4"]
    assert (
        (run / "checkpoint").is_symlink()
        and (run / "previous").is_symlink()
        and (tmp_path / "entry").is_symlink()
    )
    assert {path: path.read_bytes() for path in archive.rglob("*") if path.is_file()} == before


def test_a_checkpoint_of_torch_is_recognized_with_the_way_across(tool, tmp_path):
    folder = tmp_path / "outputs/checkpoint/step-10"
    dcp.save({"w": torch.ones(3)}, checkpoint_id=folder, no_dist=True)
    export = "export", folder, tmp_path / "out"
    for words in (
        ("ls", tmp_path / "outputs"),
        ("verify", folder.parent),
        ("show", folder),
        ("verify", folder),
        export,
    ):
        code, out = tool("checkpoint", *words)
        assert (
            code in (1, 2) and "torch's DCP format" in out and "checkpoint.last_save_in_hf" in out
        ), (words, out)
        assert "is not a complete checkpoint" not in out


def test_show_prints_position_tensors_and_config(saved, tool):
    code, out = tool("checkpoint", "show", saved)
    assert code == 0 and "step 3" in out and "fingerprint" in out and "consumed 12" in out
    assert (
        "model.layers.0.attention.wq.weight" in out
        and "[16, 16]" in out
        and "dim 0 over dp_shard, dim 0 over tp" in out
    )
    assert "exp_avg, exp_avg_sq in" in out and 'flavor = "debugmodel"' in out


def test_diff_names_the_first_tensors_that_differ(saved, run, tool):
    code, out = tool("checkpoint", "diff", saved / "checkpoint/step-2", run / "checkpoint/step-2")
    assert code == 0 and "the same" in out
    code, out = tool("checkpoint", "diff", saved / "checkpoint/step-2", saved)
    assert code == 1 and "model.layers.0.attention.wk.weight" in out and "numbers, by" in out
    assert (
        len(out.splitlines()) == 12
        and "63 of 63 tensors differ, and 21 of the optimizer's scalars" in out
    )


def test_export_and_import_return_the_same_bits(saved, tool, tmp_path):
    left, foreign = (
        tmp_path / f".{name}.0123abcd.staging" for name in ("hf", "hfx")
    )  # by a kill; by another export
    left.mkdir()
    foreign.mkdir()
    code, out = tool("checkpoint", "export", saved, tmp_path / "hf")
    assert code == 0 and "no tokenizer is exported: the model's tokens are bytes" in out, out
    assert {path.name for path in tmp_path.iterdir()} == {"hf", foreign.name}
    code, out = tool("generate", "--checkpoint", tmp_path / "hf")
    assert code == 2 and "hf is a Hugging Face folder; to make a checkpoint of it: " in out
    assert out.endswith(f"checkpoint import {tmp_path / 'hf'} OUT\n")
    flags = [word for word in [*TINY, *MESH] if word.startswith("--model")]
    code, out = tool("checkpoint", "import", tmp_path / "hf", tmp_path / "back", *flags)
    assert code == 0 and "initial_load_path" in out
    before = load_tensors(saved / "checkpoint/step-3")
    after = load_tensors(tmp_path / "back/step-0")
    assert after.keys() == {name for name in before if name.startswith("model.")}
    assert all(torch.equal(after[name], before[name]) for name in after)
    assert tool("checkpoint", "verify", tmp_path / "back")[0] == 0
    assert tool("checkpoint", "export", saved, tmp_path / "hf")[0] == 2, (
        "a folder is never overwritten"
    )
    assert tool("checkpoint", "import", tmp_path / "hf", tmp_path / "back", *flags)[0] == 2
    code, out = tool(
        "checkpoint",
        "import",
        tmp_path / "hf",
        tmp_path / "other",
        *flags,
        "--model.overrides.n_layers=3",
    )
    assert (
        code == 2
        and "model.layers.2.self_attn.q_proj.weight: missing" in out
        and "num_hidden_layers 2, but the model has 3" in out
    )
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("umask", sample([0o022, 0o027], long=[0o027]), ids=oct)
def test_what_is_written_follows_the_umask(tool, tmp_path, umask):
    """Of a run: metrics, logs, TensorBoard, traces, checkpoints, weights; exports, prepared shards,
    plots, plans.
    """
    before = os.umask(umask)
    try:
        traces = [
            "--profiling.enable_profiling",
            "--profiling.profile_freq=2",
            "--profiling.profiler_warmup=0",
        ]
        argv = [
            *TINY,
            "--checkpoint.enable",
            "--checkpoint.last_save_in_hf",
            "--metrics.enable_tensorboard",
            *traces,
        ]
        assert train(argv, tmp_path / "run", NGPU="1")[0] == 0
        (tmp_path / "a.txt").write_text(TEXT)
        for words in (
            ("checkpoint", "export", tmp_path / "run", tmp_path / "hf"),
            (
                "checkpoint",
                "export",
                tmp_path / "run",
                tmp_path / "plain",
                "--format",
                "safetensors",
            ),
            ("data", "prepare", tmp_path / "a.txt", "--out", tmp_path / "shards"),
            ("plot", tmp_path / "run", "--out", tmp_path / "plot.png"),
            ("plot", tmp_path / "run", "--out", tmp_path / "plot.html"),
            (
                "plan",
                "--config",
                "debug.toml",
                "--world=1",
                "--gpu=h100-80g",
                "--html",
                tmp_path / "plan.html",
            ),
        ):
            code, out = tool(*words)
            assert code == 0, out
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    kinds = {path.suffix for path in files}
    assert kinds >= {
        ".safetensors",
        ".log",
        ".jsonl",
        ".json",
        ".toml",
        ".bin",
        ".npy",
        ".png",
        ".html",
    }
    assert [path for path in files if path.stat().st_mode & 0o777 != 0o666 & ~umask] == []


def test_exported_weights_follow_the_umask(saved, tool, tmp_path):
    before = os.umask(0o027)
    try:
        assert tool("checkpoint", "export", saved, tmp_path / "hf")[0] == 0
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "hf").iterdir()} == {0o640}


def test_an_export_is_of_the_model_that_was_trained_though_its_flavor_was_edited(
    saved, tool, tmp_path, monkeypatch
):
    edited = replace(llama3.FLAVORS["debugmodel"], rope_theta=5.0)
    monkeypatch.setitem(llama3.FLAVORS, "debugmodel", edited)
    code, out = tool("checkpoint", "export", saved, tmp_path / "hf")
    assert (
        code == 0 and json.loads((tmp_path / "hf/config.json").read_text())["rope_theta"] == 10000.0
    )
    code, out = tool("generate", "--config", saved / "config.toml", "--tokens", "1")
    assert (
        code == 2
        and "model.overrides.rope_theta: 10000.0 in the checkpoint, 5.0 in this run" in out
    )


def test_an_import_names_a_folder_that_is_not_there_or_has_no_model(tool, tmp_path):
    for folder, says in (("nowhere", "there is no such folder"), (".", "has no config.json")):
        code, out = tool("checkpoint", "import", tmp_path / folder, tmp_path / "out")
        assert code == 2 and says in out and "model.flavor" not in out


def test_a_run_starts_from_an_imported_checkpoint(pool, saved, tool, tmp_path):
    tool("checkpoint", "export", saved, tmp_path / "hf")
    flags = [word for word in [*TINY, *MESH] if word.startswith("--model")]
    tool("checkpoint", "import", tmp_path / "hf", tmp_path / "back", *flags)
    argv = [
        *TINY,
        *MESH,
        f"--checkpoint.initial_load_path={tmp_path}/back",
        "--model.overrides.rope_theta=2e4",
    ]
    argv += [
        "--checkpoint.exclude_from_loading=['model.overrides.rope_theta']"
    ]  # on purpose, a longer wavelength
    found = pool.run(run_until, argv, str(tmp_path / "run"), 0, world=4)
    assert f"loaded weights from {tmp_path}/back/step-0" in found[0]["log"]


def test_a_damaged_checkpoint_is_not_exported(run, tool, tmp_path):
    for step in (1, 2, 3):
        flip(run / f"checkpoint/step-{step}/rank-0.safetensors", 5000)
    code, out = tool("checkpoint", "export", run, tmp_path / "hf")
    assert (
        code == 2
        and "nothing was exported" in out
        and "rank-0.safetensors" in out
        and not (tmp_path / "hf").exists()
    )


def test_a_model_without_hugging_face_names_is_exported_as_safetensors(pool, tool, tmp_path):
    pool.run(run_until, [*PARROT, "--checkpoint.enable"], str(tmp_path), world=2)
    code, out = tool(
        "checkpoint", "export", tmp_path, tmp_path / "out", "--model.package", "parrot"
    )
    assert code == 2 and "parrot has no Hugging Face names" in out and "--format safetensors" in out
    with pytest.raises(UserError, match='--model.package parrot, in Python package="parrot"'):
        titanlite.load(tmp_path)
    assert titanlite.load(tmp_path, package="parrot")[0]
    code, out = tool(
        "checkpoint",
        "export",
        tmp_path,
        tmp_path / "out",
        "--format",
        "safetensors",
        "--dtype=bfloat16",
    )
    assert code == 0, out
    from safetensors.torch import load_file

    found = load_file(next((tmp_path / "out").glob("*.safetensors")))
    expected = load_tensors(tmp_path / "checkpoint/step-3")
    assert found.keys() == {
        name.removeprefix("model.") for name in expected if name.startswith("model.")
    }
    assert all(
        torch.equal(tensor, expected[f"model.{name}"].bfloat16()) for name, tensor in found.items()
    )


def test_a_package_named_by_a_folder_is_not_imported(run, tool, tmp_path, monkeypatch):
    (tmp_path / "stranger.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = run / "checkpoint/step-3"
    config = (folder / "config.toml").read_text().replace('package = ""', 'package = "stranger"')
    plant(folder, "config.toml", config.encode())
    for words in (
        ("export", folder, tmp_path / "hf"),
        ("show", folder),
        ("ls", run),
        ("diff", folder, folder),
        (),
    ):
        code, out = (
            tool("checkpoint", *words) if words else tool("generate", "--checkpoint", folder)
        )
        assert not (tmp_path / "ran").exists()
        if words[:1] in (("export",), ()):
            assert code == 2 and "imported only if you name it: --model.package stranger" in out


def test_rm_keeps_the_last_complete_checkpoint_and_the_last_that_can_be_resumed(run, tool):
    root = run / "checkpoint"
    assert (
        tool("checkpoint", "rm", root / "step-3", "--dry-run")[0] == 0 and len(steps_in(run)) == 3
    )
    manifest = read_manifest(root / "step-3")
    (root / "step-3/manifest.json").write_bytes(replace(manifest, weights_only=True).render())
    code, out = tool("checkpoint", "rm", root / "step-2", root / "step-1")
    assert code == 2 and "no checkpoint that can be resumed left" in out and len(steps_in(run)) == 3
    code, out = tool("checkpoint", "rm", root / "step-3")
    assert (
        code == 0
        and steps_in(run) == ["step-1", "step-2"]
        and (root / "latest").read_text() == "step-2\n"
    )
    os.truncate(root / "step-1/state.json", 3)
    code, out = tool("checkpoint", "rm", root / "step-2")
    assert (
        code == 2
        and "no complete checkpoint left" in out
        and "--force" in out
        and len(steps_in(run)) == 2
    )
    assert tool("checkpoint", "rm", root / "step-1")[0] == 0 and steps_in(run) == ["step-2"]
    for wrong in (run, root / "latest", root / "step-9"):
        code, out = tool("checkpoint", "rm", wrong)
        assert code == 2 and "is not a complete checkpoint" in out
    assert tool("checkpoint", "rm", root / "step-2", "--force")[0] == 0 and steps_in(run) == []
    assert not (root / "latest").exists() and read_manifest


def test_generate_samples_from_the_newest_checkpoint_of_any_mesh(saved, run, tool):
    asked = ("--prompt", "def ", "--tokens", "12", "--temperature=0")
    code, out = tool("generate", "--config", saved / "config.toml", *asked)
    assert code == 0 and out.startswith("def ") and "step-3" in out
    os.truncate(run / "checkpoint/step-3/state.json", 3)
    again = tool(
        "generate", "--config", saved / "config.toml", "--checkpoint", run / "checkpoint", *asked
    )
    assert again[0] == 0 and f"{run}/checkpoint/step-2" in again[1]
    flip(run / "checkpoint/step-2/rank-0.safetensors", 5000)
    os.truncate(run / "checkpoint/step-1/state.json", 3)
    for step, says in (
        (2, "checksum mismatch"),
        (1, "state.json: 3 bytes"),
        (9, "step-9 does not exist; steps there: 1, 2, 3"),
    ):
        folder = run / f"checkpoint/step-{step}"
        code, out = tool(
            "generate", "--config", saved / "config.toml", "--checkpoint", folder, *asked
        )
        assert code == 2 and says in out


def test_the_config_of_a_checkpoint_is_its_own_by_default(saved, tool, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = tool(
        "generate", "--config", saved / "config.toml", "--prompt", "def ", "--tokens", "12"
    )
    asked = ("--prompt", "def ", "--tokens", "12")
    for folder in (saved, saved / "checkpoint", saved / "checkpoint/step-3"):
        assert tool("generate", "--checkpoint", folder, *asked) == expected and expected[0] == 0
    code, out = tool("generate")
    assert code == 2 and "there is no checkpoint in outputs/checkpoint yet" in out
    code, out = tool("generate", "--config", "debug.toml", "--job.dump_folder=other")
    assert (
        code == 2
        and "there is no checkpoint in other/checkpoint yet" in out
        and len(out.splitlines()) == 1
    )
    (tmp_path / "outputs").symlink_to(saved)
    assert tool("generate", *asked)[1].splitlines()[:-1] == expected[1].splitlines()[:-1]
    for named in ("config.toml", "checkpoint/step-3/config.toml"):
        code, out = tool("generate", "--checkpoint", saved / named)
        assert code == 2 and f"{saved / named} is a file; name the checkpoint's folder" in out


def test_the_checkpoints_of_a_run_are_found_in_the_folder_that_its_config_names(
    run, tool, tmp_path, monkeypatch
):
    (run / "checkpoint").rename(run / "states")
    config = run / "config.toml"
    config.write_text(config.read_text().replace('folder = "checkpoint"', 'folder = "states"'))
    asked = ("--prompt", "def ", "--tokens", "2")
    assert "step-3" in tool("checkpoint", "ls", run)[1]
    by_name = tool("generate", "--checkpoint", run, *asked)
    assert by_name[0] == 0 and f"{run}/states/step-3" in by_name[1]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs").symlink_to(run)
    code, out = tool("generate", *asked)
    assert code == 0 and "outputs/states/step-3" in out


def test_each_seed_draws_another_text_and_top_k_and_top_p_narrow_the_draw(saved, tool):
    def text(*words: str) -> str:
        code, out = tool(
            "generate", "--checkpoint", saved, "--prompt", "def ", "--tokens", "12", *words
        )
        assert code == 0, out
        return out.rpartition("titanlite:")[0]

    assert text() != text("--seed", "5") == text("--debug.seed", "5") != text("--seed", "6")
    several = text("--samples", "3", "--seed", "4")
    headings = re.findall(r"^----- sample (\d) of 3, seed (\d) -----$", several, re.MULTILINE)
    assert headings == [("1", "4"), ("2", "5"), ("3", "6")]
    assert text("--seed", "5") + "\n-----" in several and several.endswith(text("--seed", "6"))
    greedy = text("--temperature=0")
    assert (
        text("--top-k", "1", "--temperature=5")
        == text("--top-p", "1e-9", "--temperature=5")
        == greedy
        != text()
    )
    for option, value, says in (
        ("--top-k", "0", "--top-k 0: must be 1 or more"),
        ("--top-p", "1.5", "--top-p 1.5: must be above 0"),
        ("--top-p", "nan", "--top-p nan: must be above 0"),
        ("--top-k", "x", "--top-k: invalid int value: 'x'"),
        ("--seed", "x", "debug.seed = "),
        ("--samples", "0", "--samples: must be a whole number >= 1, not '0'"),
    ):
        code, out = tool("generate", "--checkpoint", saved, option, value)
        assert code == 2 and says in out and "Traceback" not in out


def test_top_k_and_top_p_keep_the_likeliest_tokens():
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()

    def kept(top_k: int | None, top_p: float, temperature: float = 1.0) -> list[int]:
        return narrowing(temperature, top_k, top_p)(logits).isfinite().nonzero().flatten().tolist()

    assert kept(None, 1.0) == [0, 1, 2, 3] == kept(9, 1.0) and kept(2, 1.0) == [1, 3]
    assert kept(None, 0.6) == [1, 3] and kept(None, 0.75) == [1, 2, 3] and kept(None, 0.39) == [1]
    assert kept(2, 0.56) == [1] and kept(2, 0.58) == [1, 3], (
        "the chances are those among the two likeliest"
    )
    assert kept(None, 0.6, temperature=0.1) == [1] == kept(None, 0.6, temperature=1e-300)
    assert _sample(logits, 1e-300, torch.Generator()) == 1


def test_text_is_printed_as_its_tokens_come_and_never_half_a_character(capsys):
    show, seen = Show(ByteTokenizer()), []
    tokens = [*"aé€".encode(), 0xFF, *b"b\x1b"]
    for count in range(1, len(tokens) + 1):
        show(tokens[:count])
        seen.append(capsys.readouterr().out)
    assert seen == ["a", "", "é", "", "", "€", "", "\N{REPLACEMENT CHARACTER}b", "·"]


def test_evaluate_returns_the_loss_of_validation_and_bits_per_byte(saved, tool):
    logged = [json.loads(line) for line in (saved / "metrics.jsonl").read_text().splitlines()]
    (expected,) = (line["validation_loss"] for line in logged if "validation_loss" in line)
    code, out = tool("evaluate", "--checkpoint", saved)
    assert code == 0, out
    found = dict(re.findall(r"^(\S.*?)  +(.*)$", out, re.MULTILINE))
    tokens = (
        len(TEXT) // 16 * 16
    )  # the end of the document is the last token, and no window's label
    assert float(found["loss"]) == pytest.approx(expected, abs=2e-5)
    assert float(found["bits per byte"]) == pytest.approx(expected / math.log(2), abs=2e-5)
    assert (
        found["tokens"] == found["bytes"] == str(tokens)
        and found["windows"] == f"{tokens // 16} of 16 tokens"
    )
    named = ("--dataset", "text", "--dataset-path", saved / "held.txt")
    assert tool("evaluate", "--checkpoint", saved, *named) == (0, out)
    code, out = tool("evaluate", "--checkpoint", saved, *named, "--steps", "1")
    assert code == 0 and "8 of 16 tokens\n" in out
    code, out = tool("evaluate", "--checkpoint", saved, *named, "--steps", "1000")
    assert f"{tokens // 16} of 16 tokens; 1,000 steps would take 8,000\n" in out
    for words, says in (
        (
            ("--dataset", "text", "--dataset-path", "none.txt"),
            'validation.dataset_path = "none.txt"',
        ),
        (
            ("--dataset-path", "none.txt"),
            '--dataset-path none.txt: name its kind too, as in "--dataset text"',
        ),
        (
            ("--dataset", "texd"),
            'validation.dataset = "texd" is not a data set; did you mean text?',
        ),
        (("--validation.no_enable",), "the run has no validation set"),
    ):
        code, out = tool("evaluate", "--checkpoint", saved, *words)
        assert code == 2 and says in out and "Traceback" not in out


def test_bytes_are_those_of_the_text_without_its_ends(tmp_path):
    tokenizer = load_tokenizer(str(make_assets(tmp_path, ["naïve café, naïve café"])))
    labels = [*tokenizer.encode("naïve café"), tokenizer.end, -100]
    counted = Counted([np.asarray([[[0] * len(labels), labels]])], tokenizer)
    assert len([*counted]) == 1
    assert (counted.windows, counted.tokens, counted.bytes) == (
        1,
        len(labels) - 1,
        len("naïve café".encode()),
    )


def test_load_returns_the_saved_model_and_its_tokenizer(saved):
    model, tokenizer = titanlite.load(saved, "--training.seq_len=32")
    expected = load_tensors(saved / "checkpoint/step-3")
    assert not model.training and all(
        torch.equal(p, expected[f"model.{n}"]) for n, p in model.named_parameters()
    )
    assert model(torch.tensor([tokenizer.encode("x" * 32)])).shape == (1, 32, 256)
    code = (
        "import sys, titanlite; titanlite.load; "
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_wrong_arguments_are_named(tool, tmp_path):
    for words, says in (
        (("checkpoint", "lss"), "did you mean 'ls'?"),
        (("checkpoint", "diff", "a"), "required: B"),
        (("checkpoint", "ls", tmp_path), "no checkpoint in"),
        (("checkpoint", "ls", tmp_path / "step-9"), "step-9 does not exist\n"),
        (("evaluate", "--checkpoint", tmp_path / "nowhere"), "nowhere does not exist\n"),
        (("checkpoint", "verify", __file__), "is a file; name the checkpoint's folder\n"),
        (("checkpoint", "export", tmp_path, "x", "--fromat=hf"), "did you mean --format?"),
        (("generate", "--checkpoint"), "--checkpoint: expected one argument"),
    ):
        code, out = tool(*words)
        assert code == 2 and says in out


def test_the_tour_takes_a_folder_with_blanks(monkeypatch, tmp_path):
    commands, folder = [], tmp_path / "a b"
    monkeypatch.setattr(tour, "_python", lambda *arguments, **_: commands.append(arguments) or "")
    tour._titanlite("checkpoint export", folder / "run", folder / "out", NGPU="1")

    def start(command, **_):
        commands.append(command)
        raise InterruptedError

    monkeypatch.setattr(tour.subprocess, "Popen", start)
    with pytest.raises(InterruptedError):
        tour._train_and_kill(folder)
    assert commands[0][-2:] == (f"{folder}/run", f"{folder}/out")
    assert commands[1][-2:] == ["--job.dump_folder", str(folder)]


def test_a_tour_that_fails_says_what_differs_and_by_how_much(tool, monkeypatch, tmp_path):
    def write(folder: Path, validation: float) -> str:
        folder.mkdir(parents=True, exist_ok=True)
        lines: list[dict] = [asdict(record(step, 2.0)) for step in range(1, tour.STEPS + 1)]
        lines.append({"step": tour.STEPS, "validation_loss": validation})
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return "resumed step 20"

    monkeypatch.setattr(tour, "_train_and_kill", lambda dump: write(dump, 2.80))
    monkeypatch.setattr(tour, "latest_complete", lambda _: 20)
    monkeypatch.setattr(
        tour, "_titanlite", lambda _, folder, NGPU: write(folder, 2.80 if NGPU == "2" else 2.84)
    )
    code, out = tool("tour", "--to", tmp_path)
    assert (
        code == 2
        and "FAILED: training or validation losses differ by 4.0e-02, and may differ by 1e-04"
        in out
    )
    assert f"compare {tmp_path}/run/metrics.jsonl with {tmp_path}/single/metrics.jsonl" in out


def test_the_tour_kills_processes_in_their_own_sessions():
    child = "import subprocess as s, time; p = s.Popen(['sleep', '60'], start_new_session=True)"
    child += "; print(p.pid, flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE)
    assert process.stdout is not None
    grandchild = int(process.stdout.readline())
    tour._kill_all(process)
    for _ in range(100):
        state = subprocess.run(
            ["ps", "-o", "stat=", "-p", str(grandchild)], capture_output=True, text=True
        ).stdout
        if not state.strip() or state.startswith("Z"):
            break
        time.sleep(0.05)
    else:
        raise AssertionError("it lives")
    assert process.returncode == -9
