"""Loading: the newest verified checkpoint or an error that names what is wrong; all of it or
nothing; never code.
"""

import errno
import json
import os
import pickle
import shutil
import warnings
import zlib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.checkpoint import format1
from tests.checkpoint.saved import (
    SAVING,
    digests,
    everyone,
    joined,
    keeping_log,
    run_until,
    steps_in,
)
from tests.jobs import FLOAT64, TINY, job, trainer, weights
from tests.observe.test_sinks import tensorboard
from titanlite.checkpoint import load as checkpoint_load
from titanlite.checkpoint.load import at_path, load_tensors, restore
from titanlite.checkpoint.manifest import (
    MANIFEST,
    CorruptCheckpoint,
    File,
    Manifest,
    faults,
    is_complete,
    read_manifest,
)
from titanlite.checkpoint.resume import saved_model
from titanlite.checkpoint.root import checkpoints_of
from titanlite.checkpoint.rules import check_model
from titanlite.cli import main
from titanlite.config.load import ConfigError
from titanlite.errors import RunFailed, UserError
from titanlite.models import gpt2, llama3
from titanlite.runtime import store


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory) -> Path:
    """A run with step-1, step-2 and step-3."""
    folder = tmp_path_factory.mktemp("saved")
    pool.run(run_until, SAVING, str(folder), world=2)
    return folder


@pytest.fixture
def run(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


def flip(path: Path, offset: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1
    path.write_bytes(raw)


def test_every_kind_of_damage_names_the_file(saved, tmp_path):
    for name in sorted(path.name for path in (saved / "checkpoint/step-3").iterdir()):
        size = (saved / "checkpoint/step-3" / name).stat().st_size
        for damage in ("flip", "flip last", "truncate", "lengthen", "missing"):
            copy = Path(shutil.copytree(saved / "checkpoint/step-3", tmp_path / f"{name}-{damage}"))
            if damage.startswith("flip"):
                flip(copy / name, size // 2 if damage == "flip" else size - 1)
            elif damage == "missing":
                (copy / name).unlink()
            else:
                os.truncate(copy / name, size - 1 if damage == "truncate" else size + 1)
            try:
                manifest = read_manifest(copy)
                found = faults(copy, manifest, manifest.files)
            except UserError as error:
                found = [str(error)]
            assert len(found) == 1 and str(copy) in found[0] and (name in found[0]), (name, damage)
    copy = Path(shutil.copytree(saved / "checkpoint/step-3", tmp_path / "extra"))
    (copy / "more").touch()
    assert faults(copy, read_manifest(copy)) == [f"{copy / 'more'}: not part of the checkpoint"]


def start(argv: list[str], folder: str) -> tuple[int, str, list[str]]:
    """Return the step that a run would start at, or -1; the error; and the log."""
    log, lines = keeping_log()
    try:
        return trainer(argv, folder, log).step, "", lines
    except UserError as error:
        return -1, str(error), lines


def test_a_damaged_checkpoint_is_skipped_whichever_rank_reads_the_file(pool, run):
    smaller, largest = sorted(
        run.glob("checkpoint/step-3/rank-*"), key=lambda path: path.stat().st_size
    )
    damaged = [largest, run / "checkpoint/step-2" / smaller.name]
    for path in damaged:
        flip(path, 5000)
    for step, _, log in pool.run(start, SAVING, str(run), world=2):
        assert step == 1
        assert log[:2] == [f"skipping checkpoint: {path}: checksum mismatch" for path in damaged]
        assert f"resumed step 1 from {run}/checkpoint/step-1" in log
    assert (
        steps_in(run) == ["step-1"] and len(list(run.glob("previous/*/checkpoint/step-[23]"))) == 2
    )


def test_verify_on_load_sizes_reads_only_small_files(pool, run):
    argv = [*SAVING, "--checkpoint.verify_on_load=sizes"]
    flip(run / "checkpoint/step-3/rank-0.safetensors", 3000)
    assert pool.run(start, argv, str(run), world=1)[0][0] == 3
    os.truncate(run / "checkpoint/step-3/rank-0.safetensors", 10)
    assert pool.run(start, argv, str(run), world=1)[0][0] == 2
    flip(run / "checkpoint/step-2/environment.json", 3)  # small files are always read
    assert pool.run(start, argv, str(run), world=1)[0][0] == 1


def sizes_asked(folder: str) -> list[str]:
    """Verify a checkpoint; return the files whose sizes this rank asked for."""
    asked = []
    with pytest.MonkeyPatch.context() as patch:
        size = store.size
        patch.setattr(store, "size", lambda path: asked.append(path.name) or size(path))
        at_path(Path(folder), True, dist.group.WORLD, weights_only=False)  # type: ignore[arg-type]
    return asked


def test_the_size_of_a_file_is_asked_by_one_rank(pool, saved):
    folder = saved / "checkpoint/step-3"
    asked = pool.run(sizes_asked, str(folder), world=2)
    assert sorted(asked[0] + asked[1]) == sorted(read_manifest(folder).files)
    assert abs(len(asked[0]) - len(asked[1])) <= 1


def test_an_outline_is_the_manifest_without_tensors_and_no_damage_escapes_it(saved, tmp_path):
    copy = Path(shutil.copytree(saved / "checkpoint/step-3", tmp_path / "step-3"))
    assert read_manifest(copy, outline=True) == replace(read_manifest(copy), tensors={})
    raw = (copy / MANIFEST).read_bytes()
    for offset in {*range(0, len(raw), 97), *range(30), *range(len(raw) - 30, len(raw))}:
        flip(copy / MANIFEST, offset)
        with pytest.raises(CorruptCheckpoint, match=f"{MANIFEST}: damaged, not as it was written"):
            read_manifest(copy, outline=True)
        flip(copy / MANIFEST, offset)
    (copy / MANIFEST).write_bytes(raw + b"\n")
    assert not is_complete(copy)


def test_load_step_refuses_a_damaged_checkpoint(pool, run):
    flip(run / "checkpoint/step-3/state.json", 30)
    for step, message, _ in pool.run(
        start, [*SAVING, "--checkpoint.load_step=3"], str(run), world=2
    ):
        assert (
            step == -1
            and message.startswith("checkpoint.load_step: ")
            and "step-3/state.json" in message
        )


def test_a_run_with_only_damaged_checkpoints_does_not_start_over(pool, run):
    for step in (1, 2, 3):
        (run / f"checkpoint/step-{step}/state.json").unlink()
    ((step, message, log),) = pool.run(start, SAVING, str(run), world=1)
    assert step == -1 and "can be resumed, and there are 3" in message and len(log) == 3


def test_a_missing_checkpoint_is_an_error(pool, run, tmp_path):
    for argv, says in (
        ([*SAVING, "--checkpoint.load_step=7"], "no such checkpoint in"),
        (
            [*TINY, f"--checkpoint.initial_load_path={tmp_path}/nowhere"],
            "is not a complete checkpoint",
        ),
    ):
        ((step, message, _),) = pool.run(start, argv, str(run), world=1)
        assert step == -1 and says in message


def test_latest_names_the_newest_step_from_the_next_start_on_if_a_kill_came_before_it_was_written(
    pool, run
):
    (run / "checkpoint/latest").write_text("step-2\n")
    assert pool.run(start, SAVING, str(run), world=1)[0][0] == 3
    assert (run / "checkpoint/latest").read_text() == "step-3\n"


def test_load_step_archives_later_checkpoints(pool, run):
    ((step, _, log),) = pool.run(start, [*SAVING, "--checkpoint.load_step=1"], str(run), world=1)
    assert step == 1 and any("later checkpoints (2, 3) are now in" in line for line in log)
    assert steps_in(run) == ["step-1"] and (run / "checkpoint/latest").read_text() == "step-1\n"
    kept = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert set(kept) == {1}


def test_metrics_before_an_earlier_load_step_are_the_checkpoints_and_after_it_the_new_runs(
    pool, run
):
    argv = [*SAVING, "--metrics.enable_tensorboard", "--optimizer.lr=1e-3", "--training.steps=3"]
    shutil.rmtree(run)
    pool.run(run_until, argv, str(run), world=2)
    rates = [
        json.loads(line).get("lr") for line in (run / "metrics.jsonl").read_text().splitlines()
    ]
    first = [rate for rate in rates if rate]
    again = ["--checkpoint.load_step=1", "--optimizer.lr=2e-3", "--training.steps=2"]
    pool.run(run_until, [*argv, *again], str(run), world=2)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = {record["step"]: record["lr"] for record in records if "lr" in record}
    assert found == {1: first[0], 2: 2 * first[1]}, "and nothing of step 3"
    assert len([record for record in records if "lr" in record]) == 2, "no step twice"
    assert tensorboard(run / "tb")["lr"] == pytest.approx(found)


def weights_of(argv: list[str], folder: str) -> dict:
    log, lines = keeping_log()
    run = trainer(argv, folder, log)
    return {"step": run.step, "weights": weights(run), "log": lines}


def test_initial_load_path_loads_weights_or_everything(pool, saved, tmp_path):
    expected = load_tensors(saved / "checkpoint/step-3")
    for place in (saved, saved / "checkpoint"):
        argv = [*TINY, f"--checkpoint.initial_load_path={place}"]
        (found,) = pool.run(weights_of, argv, str(tmp_path / "a"), world=1)
        begin = f"loaded weights from {saved}/checkpoint/step-3"
        assert found["step"] == 0 and begin in found["log"], place
    assert all(
        torch.equal(tensor, expected[f"model.{name}"]) for name, tensor in found["weights"].items()
    )
    argv = [
        *TINY,
        f"--checkpoint.initial_load_path={saved}/checkpoint/step-2",
        "--checkpoint.no_initial_load_model_only",
    ]
    (found,) = pool.run(weights_of, argv, str(tmp_path / "b"), world=1)
    assert found["step"] == 2 and f"resumed step 2 from {saved}/checkpoint/step-2" in found["log"]
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
    resume = replace(at_path(Path(path), True, everyone(), weights_only=only), exclude=exclude)
    message = "loaded"
    try:
        restore(resume, run.state, everyone())
    except UserError as error:
        message = str(error)
    return message, all(torch.equal(tensor, before[name]) for name, tensor in weights(run).items())


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (
            "--model.overrides.hidden_dim=64",
            "w1.weight: float32 of shape [32, 16] in the checkpoint, float32 of shape [64",
        ),
        (
            "--model.overrides.n_layers=3",
            "model.layers.2.attention.wq.weight: not in the checkpoint",
        ),
        (
            "--model.overrides.n_layers=1",
            "model.layers.1.attention.wq.weight: only in the checkpoint",
        ),
        (
            "--optimizer.name=SGD",
            "optimizer.layers.0.attention.wk.weight.exp_avg: only in the checkpoint",
        ),
        (
            " ".join(FLOAT64),
            "float32 of shape [16, 16] in the checkpoint, float64 of shape [16, 16] in this run",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_changes_nothing(pool, saved, tmp_path, changed, says):
    argv, path = [*TINY, *changed.split()], str(saved / "checkpoint")
    for message, untouched in pool.run(refused, argv, str(tmp_path), path, [], world=2):
        assert "does not fit this run; nothing was loaded" in message and untouched
        assert says in message or "more" in message


def test_exclude_from_loading_lists_what_may_differ(pool, saved, tmp_path):
    path = str(saved / "checkpoint")
    for argv, exclude, says, untouched in (
        (["--optimizer.name=SGD"], ["optimizer"], "loaded", False),
        (["--model.overrides.hidden_dim=64"], ["*.feed_forward.*"], "loaded", False),
        ([], ["model.output.wieght"], "did you mean model.output.weight?", True),
        ([], ["nothing.*"], "matches nothing", True),
    ):
        ((message, same),) = pool.run(
            refused, [*TINY, *argv], str(tmp_path), path, exclude, world=1
        )
        assert says in message and same == untouched


def test_exclude_from_loading_is_refused_or_named_where_it_excludes_nothing(pool, saved, tmp_path):
    path = str(saved / "checkpoint")
    ((message, same),) = pool.run(refused, TINY, str(tmp_path), path, ["data"], True, world=1)
    assert '"data" matches nothing; there is model.NAME alone' in message and same
    argv = [*TINY, "--checkpoint.enable", '--checkpoint.exclude_from_loading=["data"]']
    (found,) = pool.run(weights_of, argv, str(tmp_path), world=1)
    scratch = f"starting from scratch: no checkpoint in {tmp_path}/checkpoint"
    assert f"{scratch}; no effect: checkpoint.exclude_from_loading" in found["log"]


LLAMA = llama3.FLAVORS["debugmodel"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"rope_theta": 5e5},
            "model.overrides.rope_theta: 500000.0 in the checkpoint, 10000.0 in this run",
        ),
        ({"norm_eps": 0.5}, "model.overrides.norm_eps: 0.5 in the checkpoint, 1e-05 in this run"),
        (
            {"n_heads": 4, "n_kv_heads": 2},
            "model.overrides.n_heads: 4 in the checkpoint, 8 in this run\n  model.over",
        ),
        (
            {"rope_scaling": {"factor": 8.0}},
            'model.overrides.rope_scaling: {"factor": 8.0} in the checkpoint, null in',
        ),
        ({"max_seq_len": 64}, ""),
        ({"a_field_of_another_version": 1}, ""),
    ],
)
def test_weights_of_a_model_with_other_fields_are_refused_with_both_values(change, says):
    saved = {**asdict(LLAMA), **change}
    if not says:
        assert check_model("step-1", saved, llama3.SPEC, LLAMA, ["optimizer"]) == ["optimizer"]
        return
    with pytest.raises(
        UserError,
        match="the weights of a llama3 with other fields; nothing was loaded. To train anew, give",
    ) as caught:
        check_model("step-1", saved, llama3.SPEC, LLAMA, ["model.overrides.dim"])
    assert says in str(caught.value)
    for patterns, rest in (
        ([f"model.overrides.{name}" for name in change], []),
        (["model.overrides.*", "optimizer"], ["optimizer"]),
        (["model"], ["model"]),
    ):
        assert check_model("step-1", saved, llama3.SPEC, LLAMA, patterns) == rest


def test_dropout_may_change_on_the_same_weights():
    flavor = gpt2.FLAVORS["debugmodel"]
    assert check_model("step-1", {**asdict(flavor), "dropout": 0.5}, gpt2.SPEC, flavor, []) == []
    with pytest.raises(UserError, match="norm_eps: 0.5 in the checkpoint, 1e-05 in this run"):
        check_model("step-1", {**asdict(flavor), "norm_eps": 0.5}, gpt2.SPEC, flavor, [])


def test_a_run_neither_starts_from_nor_resumes_weights_of_another_model(pool, run, tmp_path):
    theta = "--model.overrides.rope_theta=2e4"
    says = "model.overrides.rope_theta: 10000.0 in the checkpoint, 20000.0 in this run"
    weights_only = [*TINY, theta, f"--checkpoint.initial_load_path={run}/checkpoint"]
    assert all(says in start[1] for start in pool.run(start, weights_only, str(tmp_path), world=2))
    ((step, message, _),) = pool.run(start, [*SAVING, theta], str(run), world=1)
    assert step == -1 and says in message and steps_in(run) == ["step-1", "step-2", "step-3"]
    on_purpose = '--checkpoint.exclude_from_loading=["model.overrides.rope_theta"]'
    assert pool.run(start, [*SAVING, theta, on_purpose], str(run), world=1)[0][0] == 3
    typo = '--checkpoint.exclude_from_loading=["model.overrides.rope_teta"]'
    assert "matches nothing" in pool.run(start, [*SAVING, typo], str(run), world=1)[0][1]


def test_a_checkpoint_from_before_fields_were_saved_is_compared_by_its_config(run):
    folder = run / "checkpoint/step-3"
    environment = json.loads((folder / "environment.json").read_text())
    fields = environment.pop("model")
    assert fields == saved_model(folder, llama3.SPEC) == asdict(job(TINY, 1).model)
    plant(folder, "environment.json", json.dumps(environment).encode())
    assert saved_model(folder, llama3.SPEC) == fields
    config = (folder / "config.toml").read_text()
    plant(
        folder,
        "config.toml",
        config.replace('flavor = "debugmodel"', 'flavor = "no more"').encode(),
    )
    assert saved_model(folder, llama3.SPEC) == {}, "then only tensors are compared"


class Payload:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


def plant(folder: Path, name: str, content: bytes) -> Manifest:
    """Replace a file and its checksums, as an attacker could."""
    (folder / name).write_bytes(content)
    manifest = read_manifest(folder)
    files = {**manifest.files, name: File(len(content), zlib.crc32(content))}
    manifest = replace(manifest, files=files)
    (folder / MANIFEST).write_bytes(manifest.render())
    assert faults(folder, manifest, manifest.files) == []
    return manifest


def test_loading_a_foreign_folder_never_runs_code(tmp_path):
    format1.unpack(tmp_path)
    folder = tmp_path / "step-2"
    plant(folder, ".metadata", pickle.dumps(Payload(tmp_path / "ran")))
    assert load_tensors(folder).keys() == read_manifest(folder).tensors.keys(), (
        "the pickle beside them is never opened"
    )
    payload = tmp_path / "payload"
    torch.save(Payload(tmp_path / "ran"), payload)
    raw = bytearray((folder / "__0_0.distcp").read_bytes())
    manifest = read_manifest(folder)
    entry: Any = manifest.tensors["model.norm.weight"]
    chunk = replace(
        entry.chunks[0], file="__0_0.distcp", offset=len(raw), length=payload.stat().st_size
    )
    entry = replace(entry, chunks=(chunk,))
    manifest = replace(manifest, tensors={**manifest.tensors, "model.norm.weight": entry})
    (folder / MANIFEST).write_bytes(manifest.render())
    plant(folder, "__0_0.distcp", bytes(raw) + payload.read_bytes())
    with pytest.raises(RunFailed, match="Weights only load failed"):
        load_tensors(folder, ["model.norm.weight"])
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("format", [1, 2])
def test_a_tensor_in_a_file_beside_the_checkpoint_is_refused(saved, tmp_path, format):
    format1.unpack(tmp_path)
    folder = Path(shutil.copytree(saved / "checkpoint/step-3", tmp_path / "step-3"))
    folder = tmp_path / "step-2" if format == 1 else folder
    manifest = read_manifest(folder)
    assert manifest.format == format
    files = {
        name: file for name, file in manifest.files.items() if name.endswith((".toml", ".json"))
    }
    with pytest.raises(
        RunFailed, match=r"model\.output\.weight is in .*, which is not part of the"
    ):
        load_tensors(folder, ["model.output.weight"], replace(manifest, files=files))


def load(argv: list[str], folder: str, path: str) -> dict:
    run = trainer(argv, folder)
    restore(at_path(Path(path), True, everyone(), weights_only=False), run.state, everyone())
    return digests(run)


def test_a_checkpoint_of_format_1_is_loaded_bit_for_bit_and_resumed(pool, tmp_path):
    state = format1.unpack(tmp_path / "checkpoint")
    folder = tmp_path / "checkpoint/step-2"
    assert read_manifest(folder).format == 1 and is_complete(folder, resumable=True)
    argv = [*SAVING, *format1.ARGV, "--training.steps=3"]
    layouts = ((1, []), (2, []), (4, ["--parallelism.tensor_parallel_degree=2"]))
    for world, layout in layouts:
        ranks = pool.run(load, [*argv, *layout], str(tmp_path / "to"), str(folder), world=world)
        assert joined(ranks) == state
    (run,) = pool.run(run_until, argv, str(tmp_path), world=1)
    assert run["begun"] == 2 and steps_in(tmp_path) == ["step-2", "step-3"]
    assert read_manifest(tmp_path / "checkpoint/step-3").format == 2


def test_a_manifest_of_a_newer_format_is_refused_by_name(pool, run, capsys):
    folder = run / "checkpoint/step-3"
    raw = replace(read_manifest(folder), format=3).render()
    (folder / MANIFEST).write_bytes(raw)
    says = f"{folder / MANIFEST}: written by another version of titanlite, in a newer format"
    for outline in (False, True):
        with pytest.raises(UserError, match=says):
            read_manifest(folder, outline)
    assert pool.run(start, SAVING, str(run), world=1)[0][:2] == (-1, says)
    argv = [*SAVING, f"--job.dump_folder={run}"]
    assert main(["train", "--config", "debug.toml", *argv]) == 2  # no rank is started
    assert capsys.readouterr().err.count(says) == 1


def broken(argv: list[str], folder: str, path: str) -> str:
    """Load with a disk that fails on rank 1; return the error of this rank."""
    run = trainer(argv, folder)
    resume = at_path(Path(path), True, everyone(), weights_only=False)

    def fail(*_, **__):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(checkpoint_load, "safe_open", fail)
        with pytest.raises(RunFailed) as error:
            restore(resume, run.state, everyone())
    return str(error.value)


def test_a_file_that_one_rank_cannot_read_ends_all_ranks_with_its_name(pool, saved, tmp_path):
    folder = f"{saved}/checkpoint/step-3"
    says = f"reading {folder} failed on rank 1: OSError: [Errno 5] Input/output error"
    assert pool.run(broken, TINY, str(tmp_path), folder, world=2) == [says] * 2


def stock(reader: str, name: str, size: list[int]) -> torch.Tensor:
    """Read a tensor by torch's own reader of such files."""
    tensors = {name: torch.zeros(size)}
    storage = dcp.HuggingFaceStorageReader(reader)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(tensors, storage_reader=storage, no_dist=True)
    return tensors[name]


def test_tensors_are_read_without_a_process_group(saved):
    folder = saved / "checkpoint/step-3"
    found = load_tensors(folder, ["model.output.weight"])
    assert found.keys() == {"model.output.weight"}
    assert found["model.output.weight"].shape == (256, 16)
    for name in ("model.output.weight", "optimizer.norm.weight.exp_avg"):
        whole = load_tensors(folder, [name])[name]
        assert torch.equal(stock(str(folder), name, [*whole.shape]), whole), "torch reads it too"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--checkpoint.load_step=3", "nothing is resumed with checkpoint.enable = false"),
        ("--checkpoint.enable --checkpoint.async_mode=async_with_pinned_mem", "job.device is cpu"),
    ],
)
def test_contradicting_keys_are_refused(words, says):
    with pytest.raises(ConfigError, match=says):
        job([*TINY, *words.split()], world=1)
