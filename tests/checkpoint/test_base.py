"""Checkpoints of adapters: the base is named, read from its own place and compared."""

import shutil

import pytest
import torch

from tests.jobs import FLOAT64, TINY
from tests.messages import refused, says
from tests.runs import losses
from titanlite import cli
from titanlite.checkpoint.base import folder_fingerprint
from titanlite.checkpoint.manifest import read_manifest
from titanlite.registry.lora import is_adapter
from titanlite.runtime.store import LocalPath
from titanlite.tools.load import find_checkpoint, load
from titanlite.verify.pool import RankFailed

SAVED = [*TINY, *FLOAT64, "--model.overrides.n_kv_heads=2", "--checkpoint.enable"]
TUNED = [*SAVED, "--lora.rank=3", "--optimizer.lr=0.01", "--debug.seed=3"]
TUNED += ["--training.global_batch_size=4", "--training.local_batch_size=2"]


@pytest.fixture
def tuned(train, tmp_path) -> LocalPath:
    """The folder of a run of adapters, next to that of its base."""
    train(SAVED, tmp_path / "base")
    argv = [*TUNED, f"--checkpoint.initial_load_path={tmp_path}/base/checkpoint"]
    train(argv, tmp_path / "tuned")
    return tmp_path / "tuned"


@pytest.mark.long
def test_a_checkpoint_holds_adapters_and_resumes_on_any_mesh_beside_its_base(train, tuned):
    base = tuned.with_name("base")
    manifest = read_manifest(find_checkpoint(tuned))
    kept = [name for name in manifest.tensors if name.startswith("model.")]
    assert kept and all(map(is_adapter, kept))
    assert manifest.base and manifest.base.folder == str(find_checkpoint(base))
    argv = [*TUNED, f"--checkpoint.initial_load_path={base}/checkpoint", "--training.steps=5"]
    layouts = {"alone": [], "tp2": ["--parallelism.tensor_parallel_degree=2"]}
    layouts["pp2"] = ["--parallelism.pipeline_parallel_degree=2", "--training.local_batch_size=4"]
    found = {}
    for name, options in layouts.items():
        folder = tuned.with_name(name)
        shutil.copytree(tuned, folder)
        train([*argv, *options], folder, ranks=1 if name == "alone" else 2)
        found[name] = losses(folder)
        saved = read_manifest(find_checkpoint(folder))
        assert saved.base == manifest.base and saved.step == 5
        assert {*saved.tensors} == {*manifest.tensors}
        assert len(found[name]) == 5 and found[name] == pytest.approx(found["alone"], rel=1e-12)


def test_a_base_is_named_found_where_it_was_moved_and_not_taken_for_other_weights(
    train, begun, tuned, capsys
):
    base, moved = tuned.with_name("base"), tuned.with_name("moved")
    named = find_checkpoint(base)
    before = load(tuned)[0].state_dict()
    again = [*TUNED, f"--checkpoint.initial_load_path={base}/checkpoint"]
    says(begun(again, tuned.with_name("again"))["log"], f"reads the base from {named}: keep it")
    for command in ("verify", "ls"):
        assert cli.main(["checkpoint", command, str(tuned)]) == 0
        says(capsys.readouterr().out, f"its base, {named}, exists")
    assert cli.main(["checkpoint", "cp", str(tuned), str(tuned.with_name("copy"))]) == 0
    says(capsys.readouterr().out, f"its base stays in {named}")
    base.rename(moved)
    assert cli.main(["checkpoint", "verify", str(tuned)]) == 0
    says(capsys.readouterr().out, f"its base, {named}, is MISSING")
    with refused(named, f"{base}/checkpoint"):
        load(tuned)
    with refused(named, f"{tuned.parent} has no {named.name}"):
        load(tuned, f"--checkpoint.initial_load_path={tuned.parent}")
    for place in (moved, moved / "checkpoint", find_checkpoint(moved)):
        after = load(tuned, f"--checkpoint.initial_load_path={place}")[0].state_dict()
        assert before.keys() == after.keys()
        assert all(torch.equal(value, after[name]) for name, value in before.items())
    export = ["checkpoint", "export", str(tuned)]
    assert cli.main([*export, str(tuned / "a"), "--base=typo"]) == 2
    says(capsys.readouterr().err, "typo", "checkpoint export: --base")
    assert cli.main([*export, str(tuned / "b"), f"--base={moved}"]) == 0
    assert cli.main(["checkpoint", "show", str(tuned)]) == 0
    says(capsys.readouterr().out, f"{named}, fingerprint ")
    train([*SAVED, "--debug.seed=7"], base)
    argv = [*TUNED, f"--checkpoint.initial_load_path={base}/checkpoint", "--training.steps=5"]
    with refused(f"{base}/checkpoint", "has the fingerprint", kind=RankFailed):
        train(argv, tuned)
    assert cli.main([*export, str(tuned / "c")]) == 2
    assert not (tuned / "c").exists()


def test_adapters_are_not_continued_with_another_alpha_unless_it_is_allowed(train, tuned):
    other = [*TUNED, "--lora.alpha=64", "--training.steps=4"]
    starts = [*other, f"--checkpoint.initial_load_path={tuned}/checkpoint"]
    for argv, folder in ((other, tuned), (starts, tuned.with_name("new"))):
        with refused("lora.alpha = 64", "16", "exclude_from_loading", kind=RankFailed):
            train(argv, folder)
    train([*other, '--checkpoint.exclude_from_loading=["lora.alpha"]'], tuned)
    assert max(losses(tuned)) == 4


def test_another_rank_is_named_before_the_tensors(train, tuned):
    with refused("exclude_from_loading", "lora.rank: 3 in", "4 in", kind=RankFailed) as failed:
        train([*TUNED, "--lora.rank=4"], tuned)
    first = str(failed.value).partition("exclude_from_loading:")[2].split()[0]
    assert first == "lora.rank:"


def test_a_fingerprint_is_of_every_byte_of_a_folders_weights_and_is_kept_by_a_copy(pool, tmp_path):
    (tmp_path / "hf").mkdir()
    for name in "abc":
        (tmp_path / f"hf/{name}.safetensors").write_bytes(name.encode() * 99)
    alone = folder_fingerprint(tmp_path / "hf", None)
    assert pool.run(fingerprint_of_all, tmp_path / "hf", world=2) == [alone] * 2
    shutil.copytree(tmp_path / "hf", tmp_path / "copy")
    (tmp_path / "copy/config.json").write_text("{}")
    assert folder_fingerprint(tmp_path / "copy", None) == alone
    (tmp_path / "copy/c.safetensors").write_bytes(b"c" * 98 + b"C")
    assert folder_fingerprint(tmp_path / "copy", None) != alone


def fingerprint_of_all(folder: LocalPath) -> str:
    return folder_fingerprint(LocalPath(folder), torch.distributed.group.WORLD)
