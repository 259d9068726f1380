"""Loading: the newest verified checkpoint or an error that names what is wrong; all of it or
nothing; never code.
"""

import errno
import os
import re
import shutil
import socket
import zlib
from dataclasses import asdict, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests import messages
from tests.checkpoint.saved import SAVING, everyone, start, steps_in
from tests.jobs import FLOAT64, TINY, full, trainer, weights
from tests.messages import says
from tests.runs import records
from titanlite.checkpoint import read
from titanlite.checkpoint.load import at_path, load_tensors, restore
from titanlite.checkpoint.manifest import (
    MANIFEST,
    CorruptCheckpoint,
    File,
    faults,
    is_complete,
    read_manifest,
)
from titanlite.checkpoint.root import checkpoints_of
from titanlite.checkpoint.rules import check_model
from titanlite.cli import main
from titanlite.errors import RunFailed, UserError
from titanlite.models import gpt2, llama3
from titanlite.runtime.store import LocalPath


@pytest.fixture(scope="module")
def saved(train, tmp_path_factory) -> LocalPath:
    """A run with step-1, step-2 and step-3."""
    folder = tmp_path_factory.mktemp("saved")
    train(SAVING, folder, ranks=2)
    return folder


@pytest.fixture
def run(saved, tmp_path) -> LocalPath:
    return LocalPath(shutil.copytree(saved, tmp_path / "run"))


def flip(path: LocalPath, offset: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1
    path.write_bytes(raw)


DAMAGES = {
    "flip": lambda path: flip(path, path.stat().st_size // 2),
    "truncate": lambda path: os.truncate(path, path.stat().st_size - 1),
    "lengthen": lambda path: os.truncate(path, path.stat().st_size + 1),
    "missing": lambda path: path.unlink(),
    "more": lambda path: path.with_name("more").touch(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_kind_of_damage_names_the_file(saved, tmp_path, damage):
    for name in os.listdir(saved / "checkpoint/step-3"):
        copy = LocalPath(shutil.copytree(saved / "checkpoint/step-3", tmp_path / name))
        DAMAGES[damage](copy / name)
        try:
            manifest = read_manifest(copy)
            (found,) = faults(copy, manifest, manifest.files)
        except UserError as error:
            found = str(error)
        says(found, copy, "more" if damage == "more" else name)


def test_a_damaged_checkpoint_is_skipped_whichever_rank_reads_the_file(pool, run):
    files = run.glob("checkpoint/step-3/rank-*")
    smaller, largest = sorted(files, key=lambda path: path.stat().st_size)
    damaged = [largest, run / "checkpoint/step-2" / smaller.name]
    for path in damaged:
        flip(path, 5000)
    for found in pool.run(start, SAVING, str(run), world=2):
        lines = found["log"].splitlines()
        for line, path in zip(lines, damaged, strict=False):
            says(line, path, "checksum")
        says(lines, f"step 1 from {run}/checkpoint/step-1")
        assert found["step"] == 1
    assert steps_in(run) == ["step-1"]
    assert len([*run.glob("previous/*/checkpoint/step-[23]")]) == 2


@pytest.mark.parametrize("name", [MANIFEST, "rank-0.safetensors"])
def test_a_file_that_cannot_be_read_now_is_no_damage_and_loses_no_step(begun, run, name):
    """As of NFS (ESTALE), or of a process with too many files: here a loop of links (ELOOP)."""
    file = run / "checkpoint/step-3" / name
    kept = file.rename(run / "kept")
    file.symlink_to(file)
    says(begun(SAVING, run)["error"], str(file), socket.gethostname(), "start again")
    file.unlink()
    kept.rename(file)
    assert begun(SAVING, run)["step"] == 3


def test_verify_on_load_sizes_reads_only_small_files(begun, run):
    argv = [*SAVING, "--checkpoint.verify_on_load=sizes"]
    flip(run / "checkpoint/step-3/rank-0.safetensors", 3000)
    assert begun(argv, run)["step"] == 3
    os.truncate(run / "checkpoint/step-3/rank-0.safetensors", 10)
    assert begun(argv, run)["step"] == 2
    flip(run / "checkpoint/step-2/environment.json", 3)  # small files are always read
    assert begun(argv, run)["step"] == 1


def sizes_asked(folder: str) -> list[str]:
    """Verify a checkpoint; return the files whose sizes this rank asked for."""
    step = LocalPath(folder)
    with patch.object(LocalPath, "stat", autospec=True, side_effect=LocalPath.stat) as stat:
        at_path(step, True, everyone(), weights_only=False)
    asked = (call.args[0].name for call in stat.call_args_list)
    return [name for name in asked if name in read_manifest(step).files]


def test_the_size_of_a_file_is_asked_by_one_rank(pool, saved):
    folder = saved / "checkpoint/step-3"
    asked = pool.run(sizes_asked, str(folder), world=2)
    assert sorted(asked[0] + asked[1]) == sorted(read_manifest(folder).files)
    assert abs(len(asked[0]) - len(asked[1])) <= 1


def test_an_outline_is_the_manifest_without_tensors_and_no_damage_escapes_either(saved, tmp_path):
    copy = LocalPath(shutil.copytree(saved / "checkpoint/step-3", tmp_path / "step-3"))
    assert read_manifest(copy, outline=True) == replace(read_manifest(copy), tensors={})
    raw = (copy / MANIFEST).read_bytes()
    for offset in {*range(0, len(raw), 97), *range(30), *range(len(raw) - 30, len(raw))}:
        flip(copy / MANIFEST, offset)
        for outline in (False, True):
            with messages.refused(copy / MANIFEST, "damaged", kind=CorruptCheckpoint):
                read_manifest(copy, outline)
        flip(copy / MANIFEST, offset)
    (copy / MANIFEST).write_bytes(raw + b"\n")
    assert not is_complete(copy)


def test_what_is_asked_for_and_damaged_or_missing_is_an_error(pool, run, tmp_path):
    flip(run / "checkpoint/step-3/state.json", 30)
    nowhere = f"{tmp_path}/nowhere"
    for argv, named in (
        ([*SAVING, "--checkpoint.load_step=3"], ["checkpoint.load_step", "step-3/state.json"]),
        ([*SAVING, "--checkpoint.load_step=7"], ["checkpoint.load_step", "7", "1, 2, 3"]),
        ([*TINY, f"--checkpoint.initial_load_path={nowhere}"], [nowhere, "not a complete"]),
    ):
        for found in pool.run(start, argv, str(run), world=2):
            says(found["error"], *named)


def test_a_run_with_only_damaged_checkpoints_does_not_start_over(begun, run):
    for step in (1, 2, 3):
        (run / f"checkpoint/step-{step}/state.json").unlink()
    found = begun(SAVING, run)
    says(found["error"], f"{run}/checkpoint", "3")
    says(found["log"], *(f"step-{step}/state.json" for step in (1, 2, 3)))


def test_latest_names_the_newest_step_from_the_next_start_on_if_a_kill_came_before_it_was_written(
    begun, run
):
    (run / "checkpoint/latest").write_text("step-2\n")
    assert begun(SAVING, run)["step"] == 3
    assert (run / "checkpoint/latest").read_text() == "step-3\n"


def test_load_step_archives_later_checkpoints(begun, run):
    found = begun([*SAVING, "--checkpoint.load_step=1"], run)
    says(found["log"], "(2, 3)", f"{run}/previous/")
    assert found["step"] == 1
    assert steps_in(run) == ["step-1"] and (run / "checkpoint/latest").read_text() == "step-1\n"
    assert {record["step"] for record in records(run)} == {1}


def test_initial_load_path_loads_weights_or_everything(begun, saved, tmp_path):
    path = "--checkpoint.initial_load_path="
    expected = load_tensors(saved / "checkpoint/step-3")
    for place in (saved, saved / "checkpoint"):
        found = begun([*TINY, f"{path}{place}"], tmp_path)
        assert found["step"] == 0
        says(found["log"], f"{saved}/checkpoint/step-3")
        assert all(torch.equal(t, expected[f"model.{n}"]) for n, t in found["weights"].items())
    second = saved / "checkpoint/step-2"
    argv = [*TINY, f"{path}{second}", "--checkpoint.no_initial_load_model_only"]
    found = begun(argv, tmp_path)
    assert found["step"] == 2
    says(found["log"], f"step 2 from {second}")
    assert steps_in(saved) == ["step-1", "step-2", "step-3"], "another run's folder is only read"


def test_a_place_of_checkpoints_is_one_or_a_folder_of_them_or_a_run_by_its_config(tmp_path):
    (tmp_path / "config.toml").write_text('[checkpoint]\nfolder = "mine"\n')
    steps = [tmp_path / "mine" / f"step-{step}" for step in (2, 10)]
    for folder in (*steps, tmp_path / "checkpoint/step-30"):
        folder.mkdir(parents=True)
        shutil.copy(tmp_path / "config.toml", folder)
    assert checkpoints_of(tmp_path) == checkpoints_of(tmp_path / "mine") == steps
    assert checkpoints_of(steps[0]) == steps[:1]
    copied = steps[0].rename(tmp_path / "copied")
    (copied / MANIFEST).touch()
    assert checkpoints_of(copied) == [copied]
    (tmp_path / "config.toml").write_text("not a config")
    assert checkpoints_of(tmp_path) == [tmp_path / "checkpoint/step-30"]
    for none in ("mine/step-30", "nowhere", "config.toml"):
        assert checkpoints_of(tmp_path / none) == []


def refused(
    argv: list[str], folder: str, path: str, exclude: list[str], only: bool = False
) -> tuple[str, bool]:
    """Return what a strict load says, and whether the live weights are unchanged."""
    run = trainer(argv, folder)
    before = weights(run)
    resume = replace(at_path(LocalPath(path), True, everyone(), weights_only=only), exclude=exclude)
    message = "loaded"
    try:
        restore(resume, run.state, everyone())
    except UserError as error:
        message = str(error)
    return message, all(torch.equal(tensor, before[name]) for name, tensor in weights(run).items())


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (["--model.overrides.hidden_dim=64"], ["w1.weight", "[32, 16]", "[64, 16]"]),
        (["--model.overrides.n_layers=3"], ["model.layers.2.attention.wq.weight: not in"]),
        (["--optimizer.name=SGD"], ["optimizer.layers.0.attention.wk.weight.exp_avg: only in"]),
        (FLOAT64, ["float32 of shape [16, 16]", "float64 of shape [16, 16]"]),
    ],
)
def test_a_checkpoint_that_does_not_fit_changes_nothing(pool, saved, tmp_path, changed, named):
    argv, path = [*TINY, *changed], str(saved / "checkpoint")
    for message, untouched in pool.run(refused, argv, str(tmp_path), path, [], world=2):
        says(message, path, *named)
        assert untouched


def test_exclude_from_loading_lists_what_may_differ_and_is_refused_or_named_where_it_is_nothing(
    pool, begun, saved, tmp_path
):
    path = str(saved / "checkpoint")
    for argv, exclude, only, named in (
        (["--optimizer.name=SGD"], "optimizer", False, "loaded"),
        (["--model.overrides.hidden_dim=64"], "*.feed_forward.*", False, "loaded"),
        ([], "model.output.wieght", False, "did you mean model.output.weight?"),
        ([], "nothing.*", False, "nothing.*"),
        ([], "data", True, "model.NAME"),
    ):
        given = [*TINY, *argv], str(tmp_path), path, [exclude], only
        ((message, same),) = pool.run(refused, *given, world=1)
        says(message, named)
        assert same == (named != "loaded")
    argv = [*TINY, "--checkpoint.enable", '--checkpoint.exclude_from_loading=["data"]']
    log = begun(argv, tmp_path)["log"]
    says(log, f"{tmp_path}/checkpoint", "no effect: checkpoint.exclude_from_loading")


LLAMA = llama3.FLAVORS["debugmodel"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"norm_eps": 0.5}, ["norm_eps: 0.5 in", "1e-05 in"]),
        ({"n_heads": 4, "n_kv_heads": 2}, ["n_heads: 4 in", "8 in", "n_kv_heads: 2 in"]),
        ({"rope_scaling": {"factor": 8.0}}, ['rope_scaling: {"factor": 8.0} in', "null in"]),
    ],
)
def test_weights_of_a_model_with_other_fields_are_refused_with_both_values(change, named):
    def check(*exclude: str) -> list[str]:
        return check_model("step-1", {**asdict(LLAMA), **change}, llama3.SPEC, LLAMA, exclude)

    with messages.refused("step-1", "llama3", "checkpoint.exclude_from_loading", *named):
        check("model.overrides.dim")
    assert check(*(f"model.overrides.{name}" for name in change)) == []
    assert check("model.overrides.*", "optimizer") == ["optimizer"]
    assert check("model") == ["model"]


def test_fields_that_change_no_value_may_differ_on_the_same_weights():
    for spec, change in (
        (llama3.SPEC, {"max_seq_len": 64, "a_new_field": 1}),
        (gpt2.SPEC, {"dropout": 0.5}),
    ):
        flavor = spec.flavors["debugmodel"]
        saved = {**asdict(flavor), **change}
        assert check_model("step-1", saved, spec, flavor, ["optimizer"]) == ["optimizer"]


def test_a_run_neither_starts_from_nor_resumes_weights_of_another_model(begun, run, tmp_path):
    theta, field = "--model.overrides.rope_theta=2e4", "model.overrides.rope_theta"
    both = f"{field}: 10000.0", "20000.0"
    exclude = '--checkpoint.exclude_from_loading=["{}"]'.format
    weights_only = [*TINY, theta, f"--checkpoint.initial_load_path={run}/checkpoint"]
    says(begun(weights_only, tmp_path)["error"], *both)
    says(begun([*SAVING, theta], run)["error"], *both)
    assert steps_in(run) == ["step-1", "step-2", "step-3"]
    assert begun([*SAVING, theta, exclude(field)], run)["step"] == 3, "on purpose"
    says(begun([*SAVING, exclude("model.overrides.rope_teta")], run)["error"], "rope_teta")


def plant(folder: LocalPath, name: str, content: bytes) -> None:
    """Replace a file and its checksums, as an attacker could."""
    (folder / name).write_bytes(content)
    manifest = read_manifest(folder)
    files = {**manifest.files, name: File(len(content), zlib.crc32(content))}
    manifest = replace(manifest, files=files)
    (folder / MANIFEST).write_bytes(manifest.render())
    assert faults(folder, manifest, manifest.files) == []


def test_a_tensor_in_a_file_beside_the_checkpoint_is_refused(saved):
    folder, name = saved / "checkpoint/step-3", "model.output.weight"
    with messages.refused(name, folder, kind=RunFailed):
        load_tensors(folder, [name], replace(read_manifest(folder), files={}))


def test_a_manifest_of_a_newer_format_is_refused_by_name(begun, run, capsys):
    path = run / "checkpoint/step-3" / MANIFEST
    path.write_bytes(replace(read_manifest(path.parent), format=3).render())
    for outline in (False, True):
        with messages.refused(path, "newer"):
            read_manifest(path.parent, outline)
    message = begun(SAVING, run)["error"]
    says(message, path, "newer")
    argv = [*SAVING, f"--job.dump_folder={run}"]
    assert main(["train", "--config", "debug.toml", *argv]) == 2  # no rank is started
    assert capsys.readouterr().err.count(message) == 1


def broken(argv: list[str], folder: str, path: str) -> str:
    """Load with a disk that fails on rank 1; return the error of this rank."""
    run = trainer(argv, folder)
    resume = at_path(LocalPath(path), True, everyone(), weights_only=False)

    def fail(*_, **__):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    opening = fail if dist.get_rank() == 1 else read.safe_open
    with patch.object(read, "safe_open", opening), pytest.raises(RunFailed) as error:
        restore(resume, run.state, everyone())
    return str(error.value)


def test_a_file_that_one_rank_cannot_read_ends_all_ranks_with_its_name(pool, saved, tmp_path):
    folder = f"{saved}/checkpoint/step-3"
    for message in pool.run(broken, TINY, str(tmp_path), folder, world=2):
        says(message, folder, "on rank 1", "[Errno 5]")


PAGE = (LocalPath(__file__).parents[2] / "docs/checkpoints.md").read_text(encoding="utf-8")
EXAMPLES = [each for each in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "dcp." in each]


def ran(number: int, folder: str) -> dict[str, torch.Tensor]:
    """Run an example of the page as a script of this rank; return the state that it loaded."""
    names: dict[str, Any] = {}
    environment = {"WORLD_SIZE": f"{dist.get_world_size()}" if dist.is_initialized() else "1"}
    with patch.dict(os.environ, environment):
        exec(EXAMPLES[number].replace("outputs/checkpoint/step-1000", folder), names)
    return {name: full(tensor) for name, tensor in names.get("state", {}).items()}


def test_the_examples_load_a_step_by_dcp_on_other_ranks_and_by_torch_alone(
    saved, pool, tmp_path, monkeypatch
):
    folder = f"{saved}/checkpoint/step-3"
    expected = load_tensors(LocalPath(folder))
    for found in [*pool.run(ran, 0, folder, world=3), ran(1, folder)]:
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    monkeypatch.chdir(tmp_path)
    ran(2, folder)
    assert read_manifest(tmp_path / "averages/step-10").weights_only
    ((_, value),) = load_tensors(tmp_path / "averages/step-10").items()
    assert torch.equal(value, torch.ones(16))
