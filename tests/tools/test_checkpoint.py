"""`titanlite checkpoint …` and `generate` on a checkpoint of another mesh, in one process without process groups."""

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.checkpoint.saved import SAVING, run_until, steps_in
from tests.checkpoint.test_load import flip, plant
from tests.jobs import PARROT, TINY
from tests.launch.run import ROOT, environment
from titanlite.checkpoint.load import load_tensors
from titanlite.checkpoint.manifest import read_manifest
from titanlite.cli import main
from titanlite.models import llama3
from titanlite.tools import tour

MESH = ["--model.overrides.n_kv_heads=2", "--parallelism.tensor_parallel_degree=2"]


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory) -> Path:
    """A run of FSDP 2 x tensor parallel 2 with step-1, step-2 and step-3."""
    folder = tmp_path_factory.mktemp("tools")
    pool.run(run_until, [*SAVING, *MESH], str(folder), world=4)
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
    os.truncate(run / "checkpoint/step-2/__1_0.distcp", 5)
    flip(run / "checkpoint/step-1/__0_0.distcp", 5000)
    (run / "checkpoint/step-x").mkdir()
    code, out = tool("checkpoint", "ls", run)
    rows = out.splitlines()
    assert code == 0 and len(rows) == 4
    assert "dp_shard 2, tp 2" in rows[1] and rows[1].endswith("complete") and rows[3].endswith("complete")
    assert rows[2].startswith("step-2") and "damaged: " in rows[2] and "__1_0.distcp: 5 bytes" in rows[2]
    code, out = tool("checkpoint", "ls", run / "checkpoint", "--full")
    assert "damaged" in out.splitlines()[1] and out.splitlines()[3].endswith("verified")


def test_verify_reads_every_byte(run, tool):
    assert tool("checkpoint", "verify", run)[0] == 0
    flip(run / "checkpoint/step-3/__2_0.distcp", 5000)
    code, out = tool("checkpoint", "verify", run)
    assert code == 1 and "step-2: verified" in out and "__2_0.distcp: checksum mismatch" in out
    assert tool("checkpoint", "verify", run / "checkpoint/step-2")[0] == 0


def test_show_prints_position_tensors_and_config(saved, tool):
    code, out = tool("checkpoint", "show", saved)
    assert code == 0 and "step 3" in out and "fingerprint" in out and "consumed 12" in out
    assert "model.layers.0.attention.wq.weight" in out and "[16, 16]" in out and "tp 2: " in out
    assert "exp_avg, exp_avg_sq in" in out and 'flavor = "debugmodel"' in out


def test_diff_names_the_first_tensors_that_differ(saved, run, tool):
    code, out = tool("checkpoint", "diff", saved / "checkpoint/step-2", run / "checkpoint/step-2")
    assert code == 0 and "the same" in out
    code, out = tool("checkpoint", "diff", saved / "checkpoint/step-2", saved)
    assert code == 1 and "model.layers.0.attention.wk.weight" in out and "numbers, by" in out
    assert len(out.splitlines()) == 12 and "63 of 63 tensors differ, and 21 of the optimizer's scalars" in out


def test_export_and_import_return_the_same_bits(saved, tool, tmp_path):
    left, foreign = (tmp_path / f".{name}.0123abcd.staging" for name in ("hf", "hfx"))  # by a kill; by another export
    left.mkdir()
    foreign.mkdir()
    code, out = tool("checkpoint", "export", saved, tmp_path / "hf")
    assert code == 0, out
    assert {path.name for path in tmp_path.iterdir()} == {"hf", foreign.name}
    flags = [word for word in [*TINY, *MESH] if word.startswith("--model")]
    code, out = tool("checkpoint", "import", tmp_path / "hf", tmp_path / "back", *flags)
    assert code == 0 and "initial_load_path" in out
    before = load_tensors(saved / "checkpoint/step-3")
    after = load_tensors(tmp_path / "back/step-0")
    assert after.keys() == {name for name in before if name.startswith("model.")}
    assert all(torch.equal(after[name], before[name]) for name in after)
    assert tool("checkpoint", "verify", tmp_path / "back")[0] == 0
    assert tool("checkpoint", "export", saved, tmp_path / "hf")[0] == 2, "a folder is never overwritten"
    assert tool("checkpoint", "import", tmp_path / "hf", tmp_path / "back", *flags)[0] == 2
    code, out = tool(
        "checkpoint", "import", tmp_path / "hf", tmp_path / "other", *flags, "--model.overrides.n_layers=3"
    )
    assert (
        code == 2
        and "model.layers.2.self_attn.q_proj.weight: missing" in out
        and "num_hidden_layers 2, but the model has 3" in out
    )
    assert not (tmp_path / "other").exists()


def test_an_export_is_of_the_model_that_was_trained_though_its_flavor_was_edited(saved, tool, tmp_path, monkeypatch):
    edited = replace(llama3.FLAVORS["debugmodel"], rope_theta=5.0)
    monkeypatch.setitem(llama3.FLAVORS, "debugmodel", edited)
    code, out = tool("checkpoint", "export", saved, tmp_path / "hf")
    assert code == 0 and json.loads((tmp_path / "hf/config.json").read_text())["rope_theta"] == 10000.0
    code, out = tool("generate", "--config", saved / "config.toml", "--tokens", "1")
    assert code == 2 and "model.overrides.rope_theta: 10000.0 in the checkpoint, 5.0 in this run" in out


def test_a_run_starts_from_an_imported_checkpoint(pool, saved, tool, tmp_path):
    tool("checkpoint", "export", saved, tmp_path / "hf")
    flags = [word for word in [*TINY, *MESH] if word.startswith("--model")]
    tool("checkpoint", "import", tmp_path / "hf", tmp_path / "back", *flags)
    argv = [*TINY, *MESH, f"--checkpoint.initial_load_path={tmp_path}/back", "--model.overrides.rope_theta=2e4"]
    argv += ["--checkpoint.exclude_from_loading=['model.overrides.rope_theta']"]  # on purpose, a longer wavelength
    found = pool.run(run_until, argv, str(tmp_path / "run"), 0, world=4)
    assert f"loaded weights from {tmp_path}/back/step-0" in found[0]["log"]


def test_a_damaged_checkpoint_is_not_exported(run, tool, tmp_path):
    for step in (1, 2, 3):
        flip(run / f"checkpoint/step-{step}/__0_0.distcp", 5000)
    code, out = tool("checkpoint", "export", run, tmp_path / "hf")
    assert code == 2 and "nothing was exported" in out and "__0_0.distcp" in out and not (tmp_path / "hf").exists()


def test_a_model_without_hugging_face_names_is_exported_as_safetensors(pool, tool, tmp_path):
    pool.run(run_until, [*PARROT, "--checkpoint.enable"], str(tmp_path), world=2)
    code, out = tool("checkpoint", "export", tmp_path, tmp_path / "out", "--model.package", "parrot")
    assert code == 2 and "parrot has no Hugging Face names" in out and "--format safetensors" in out
    code, out = tool(
        "checkpoint", "export", tmp_path, tmp_path / "out", "--format", "safetensors", "--dtype=bfloat16"
    )
    assert code == 0, out
    from safetensors.torch import load_file

    found = load_file(next((tmp_path / "out").glob("*.safetensors")))
    expected = load_tensors(tmp_path / "checkpoint/step-3")
    assert found.keys() == {name.removeprefix("model.") for name in expected if name.startswith("model.")}
    assert all(torch.equal(tensor, expected[f"model.{name}"].bfloat16()) for name, tensor in found.items())


def test_a_package_named_by_a_folder_is_not_imported(run, tool, tmp_path, monkeypatch):
    (tmp_path / "stranger.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = run / "checkpoint/step-3"
    config = (folder / "config.toml").read_text().replace('package = ""', 'package = "stranger"')
    plant(folder, "config.toml", config.encode())
    for words in (("export", folder, tmp_path / "hf"), ("show", folder), ("ls", run), ("diff", folder, folder)):
        code, out = tool("checkpoint", *words)
        assert not (tmp_path / "ran").exists()
        if words[0] == "export":
            assert code == 2 and "imported only if you name it: --model.package stranger" in out


def test_rm_keeps_the_last_complete_checkpoint_and_the_last_that_can_be_resumed(run, tool):
    root = run / "checkpoint"
    assert tool("checkpoint", "rm", root / "step-3", "--dry-run")[0] == 0 and len(steps_in(run)) == 3
    manifest = read_manifest(root / "step-3")
    (root / "step-3/manifest.json").write_bytes(replace(manifest, weights_only=True).render())
    code, out = tool("checkpoint", "rm", root / "step-2", root / "step-1")
    assert code == 2 and "no checkpoint that can be resumed left" in out and len(steps_in(run)) == 3
    code, out = tool("checkpoint", "rm", root / "step-3")
    assert code == 0 and steps_in(run) == ["step-1", "step-2"] and (root / "latest").read_text() == "step-2\n"
    os.truncate(root / "step-1/state.json", 3)
    code, out = tool("checkpoint", "rm", root / "step-2")
    assert code == 2 and "no complete checkpoint left" in out and "--force" in out and len(steps_in(run)) == 2
    assert tool("checkpoint", "rm", root / "step-1")[0] == 0 and steps_in(run) == ["step-2"]
    for wrong in (run, root / "latest", root / "step-9"):
        code, out = tool("checkpoint", "rm", wrong)
        assert code == 2 and "is not a committed checkpoint" in out
    assert tool("checkpoint", "rm", root / "step-2", "--force")[0] == 0 and steps_in(run) == []
    assert not (root / "latest").exists() and read_manifest


def test_generate_samples_from_the_newest_checkpoint_of_any_mesh(saved, run, tool):
    asked = ("--prompt", "def ", "--tokens", "12", "--temperature=0")
    code, out = tool("generate", "--config", saved / "config.toml", *asked)
    assert code == 0 and out.startswith("def ") and "step-3" in out
    os.truncate(run / "checkpoint/step-3/state.json", 3)
    again = tool("generate", "--config", saved / "config.toml", "--checkpoint", run / "checkpoint", *asked)
    assert again[0] == 0 and f"{run}/checkpoint/step-2" in again[1]
    flip(run / "checkpoint/step-2/__0_0.distcp", 5000)
    os.truncate(run / "checkpoint/step-1/state.json", 3)
    for step, says in ((2, "checksum mismatch"), (1, "state.json: 3 bytes"), (9, "no checkpoint in")):
        folder = run / f"checkpoint/step-{step}"
        code, out = tool("generate", "--config", saved / "config.toml", "--checkpoint", folder, *asked)
        assert code == 2 and says in out


def test_wrong_arguments_are_named(tool, tmp_path):
    for words, says in (
        (("checkpoint", "lss"), "did you mean 'ls'?"),
        (("checkpoint", "diff", "a"), "required: B"),
        (("checkpoint", "ls", tmp_path), "no checkpoint in"),
        (("checkpoint", "ls", tmp_path / "step-9"), "no checkpoint in"),
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


@pytest.mark.long
def test_the_tour_proves_everything_that_it_claims(tmp_path):
    command = [sys.executable, "-m", "titanlite", "tour", "--to", str(tmp_path / "tour")]
    done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("   proved: ") == 7


def test_a_tour_that_fails_says_what_differs_and_by_how_much(tool, monkeypatch, tmp_path):
    def write(folder: Path, validation: float) -> str:
        folder.mkdir(parents=True, exist_ok=True)
        lines = [{"step": step, "loss": 2.0} for step in range(1, tour.STEPS + 1)]
        lines.append({"step": tour.STEPS, "validation_loss": validation})
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return "resumed step 20"

    monkeypatch.setattr(tour, "_train_and_kill", lambda dump: write(dump, 2.80))
    monkeypatch.setattr(tour, "latest_complete", lambda _: 20)
    monkeypatch.setattr(tour, "_titanlite", lambda _, folder, NGPU: write(folder, 2.80 if NGPU == "2" else 2.84))
    code, out = tool("tour", "--to", tmp_path)
    assert code == 2 and "FAILED: training or validation losses differ by 4.0e-02, and may differ by 1e-04" in out
    assert f"compare {tmp_path}/run/metrics.jsonl with {tmp_path}/single/metrics.jsonl" in out


def test_the_tour_kills_processes_in_their_own_sessions():
    child = "import subprocess as s, time; p = s.Popen(['sleep', '60'], start_new_session=True)"
    child += "; print(p.pid, flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE)
    assert process.stdout is not None
    grandchild = int(process.stdout.readline())
    tour._kill_all(process)
    for _ in range(100):
        state = subprocess.run(["ps", "-o", "stat=", "-p", str(grandchild)], capture_output=True, text=True).stdout
        if not state.strip() or state.startswith("Z"):
            break
        time.sleep(0.05)
    else:
        raise AssertionError("it lives")
    assert process.returncode == -9
