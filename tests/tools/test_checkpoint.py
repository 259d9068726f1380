"""`titanlite checkpoint …`: checkpoints are listed, verified, compared and copied."""

import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.checkpoint.saved import SAVING, run_until, steps_in
from tests.checkpoint.test_load import flip, plant
from tests.messages import says
from tests.tools.conftest import MESH


@pytest.mark.long
def test_ls_shows_steps_meshes_and_damage(run, tool):
    os.truncate(run / "checkpoint/step-2/rank-1.safetensors", 5)
    flip(run / "checkpoint/step-1/rank-0.safetensors", 5000)
    (run / "checkpoint/step-x").mkdir()
    _, first, second, third = tool("checkpoint ls", run).splitlines()
    says(first, "dp_shard 2, tp 2", "complete")
    says(second, "step-2", "damaged: ", "rank-1.safetensors: 5 bytes")
    says(third, "complete")
    _, first, _, third = tool("checkpoint ls", run / "checkpoint", "--full").splitlines()
    says(first, "damaged")
    says(third, "verified")


def test_verify_reads_every_byte(run, tool):
    tool("checkpoint verify", run)
    flip(run / "checkpoint/step-3/rank-2.safetensors", 5000)
    out = tool("checkpoint verify", run, code=1)
    says(out, "step-2: verified", "rank-2.safetensors: checksum mismatch")
    tool("checkpoint verify", run / "checkpoint/step-2")


def test_a_copy_that_is_there_is_success_and_another_step_of_its_number_is_kept(run, tool):
    step, copies = run / "checkpoint/step-2", run / "copies/checkpoint"
    assert tool("checkpoint cp", step, copies.parent).endswith("verified\n")
    written = (copies / "step-2").stat().st_ino
    says(tool("checkpoint cp", step, copies), step, f"{copies}/step-2 already")
    content = (step / "config.toml").read_bytes()
    plant(step, "config.toml", content + b"# another\n")
    says(tool("checkpoint cp", step, copies, code=2), step, f"{copies}/step-2 exists")
    plant(step, "config.toml", content)
    tool("checkpoint cp", step, copies)
    os.truncate(copies / "step-2/rank-1.safetensors", 5)
    says(tool("checkpoint cp", step, copies, code=2), step, f"{copies}/step-2 exists")
    assert (copies / "step-2").stat().st_ino == written


@pytest.mark.long
def test_a_step_under_another_name_is_named_and_never_resumed(run, tool, pool):
    shutil.copytree(run / "checkpoint/step-2", run / "checkpoint/step-9")
    named = (f"{run}/checkpoint/step-9", "step 2")
    says(tool("checkpoint ls", run).splitlines()[4], "damaged", *named)
    says(tool("checkpoint verify", run, code=1), *named, "step-3: verified")
    says(tool("checkpoint show", run / "checkpoint/step-9", code=2), *named)
    for rank in pool.run(run_until, [*SAVING, *MESH, "--training.steps=4"], str(run), world=4):
        assert rank["begun"] == 3
        says(rank["log"], f"skipping checkpoint: {named[0]}", "step 2")
    assert steps_in(run) == ["step-1", "step-2", "step-3", "step-4"]
    (moved,) = run.glob("previous/*")
    assert (moved / "checkpoint/step-9/manifest.json").exists()


@pytest.mark.long
def test_no_deletion_follows_a_link_at_any_level(run, tool, pool, tmp_path):
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

    left = (".step-7.0123abcd.staging", ".step-8.deleted", "hf-step-4")
    for name in (*(f"checkpoint/{each}" for each in left), "previous"):
        (run / name).mkdir()
        (run / name / "kept").touch()
        move(run / name)
    for name in ("step-1", "step-2/rank-0.safetensors", "step-3", "latest"):
        move(run / "checkpoint" / name)
    before = {path: path.read_bytes() for path in archive.rglob("*") if path.is_file()}
    disk = tmp_path / "disk"
    shutil.move(run / "checkpoint", disk)
    (run / "checkpoint").symlink_to(disk)
    (tmp_path / "entry").symlink_to(run)
    argv = [*SAVING, *MESH, "--checkpoint.keep_latest_k=1", "--training.steps=4"]
    argv += ["--checkpoint.last_save_in_hf"]
    ranks = pool.run(run_until, argv, f"{tmp_path}/entry", world=4)
    assert ranks[0]["begun"] == 3, "a link is resumed"
    assert sorted(path.name for path in disk.iterdir()) == ["hf-step-4", "latest", "step-4"]
    for link in (run / "checkpoint", run / "previous", tmp_path / "entry"):
        assert link.is_symlink()
    assert {path: path.read_bytes() for path in archive.rglob("*") if path.is_file()} == before


def test_a_checkpoint_of_torch_is_recognized_with_the_way_across(tool, tmp_path):
    step = tmp_path / "outputs/checkpoint/step-10"
    dcp.save({"w": torch.ones(3)}, checkpoint_id=step, no_dist=True)
    for words in (
        ("checkpoint ls", tmp_path / "outputs"),
        ("checkpoint verify", step.parent),
        ("checkpoint show", step),
        ("checkpoint verify", step),
        ("checkpoint export", step, tmp_path / "out"),
        ("checkpoint import", step, tmp_path / "out"),
    ):
        says(tool(*words, code=2), "DCP", f"--checkpoint.initial_load_path {step}")


def test_show_prints_position_tensors_and_config(saved, tool):
    out = tool("checkpoint show", saved)
    says(out, "step 3", "fingerprint", "consumed 12", "exp_avg, exp_avg_sq")
    says(out, "model.layers.0.attention.wq.weight", "[16, 16]", 'flavor = "debugmodel"')
    says(out, "dim 0 over dp_shard, dim 0 over tp")


def test_diff_names_the_first_tensors_that_differ(saved, run, tool):
    step = saved / "checkpoint/step-2"
    says(tool("checkpoint diff", step, run / "checkpoint/step-2"), "the same")
    out = tool("checkpoint diff", step, saved, code=1)
    says(out, "model.layers.0.attention.wk.weight", "63 of 63 tensors", "21 of")
    assert len(out.splitlines()) == 12


def test_a_package_named_by_a_folder_is_not_imported(run, tool, tmp_path, monkeypatch):
    (tmp_path / "stranger.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.syspath_prepend(str(tmp_path))
    step = run / "checkpoint/step-3"
    config = (step / "config.toml").read_text().replace('package = ""', 'package = "stranger"')
    plant(step, "config.toml", config.encode())
    for code, *words in (
        (2, "checkpoint export", step, tmp_path / "hf"),
        (2, "generate --checkpoint", step),
        (0, "checkpoint show", step),
        (0, "checkpoint ls", run),
        (0, "checkpoint diff", step, step),
    ):
        out = tool(*words, code=code)
        assert not (tmp_path / "ran").exists()
        if code:
            says(out, "--model.package stranger")
