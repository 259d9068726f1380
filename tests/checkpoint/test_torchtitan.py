"""Checkpoints of TorchTitan: runs go on from them here, and from ours there."""

import os
import pickle
import shutil
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.checkpoint.saved import digests, everyone
from tests.checkpoint.test_load import DAMAGES
from tests.jobs import MOE, job, keeping_log, trainer
from tests.lanes import sample
from tests.messages import refused, says
from titanlite import cli
from titanlite.checkpoint.load import load_tensors, restore
from titanlite.checkpoint.manifest import DCP_METADATA, read_manifest
from titanlite.checkpoint.resume import Resume
from titanlite.checkpoint.root import newest_of
from titanlite.checkpoint.torchtitan.read import DCPReader, TorchTitanCheckpoint
from titanlite.errors import UserError
from titanlite.runtime.store import LocalPath
from titanlite.train.summary import describe_start

SHARDS = "__0_0.distcp"
SAVES = "--checkpoint.enable --training.steps=2 --lr_scheduler.total_steps=9"
RESUMES = "--checkpoint.no_initial_load_model_only"
FLAVOR = job(MOE, 1)


@pytest.fixture(scope="module")
def step(train, tmp_path_factory) -> LocalPath:
    """A checkpoint of two ranks."""
    folder = tmp_path_factory.mktemp("ours")
    train([*MOE, *SAVES.split()], folder, ranks=2)
    return folder / "checkpoint/step-2"


@pytest.fixture(scope="module")
def theirs(step, tmp_path_factory) -> LocalPath:
    """The same, as TorchTitan has it."""
    folder = tmp_path_factory.mktemp("theirs") / "checkpoint/step-2"
    folder.parent.mkdir()
    words = ["checkpoint", "export", f"{step}", f"{folder}", "--format", "torchtitan"]
    assert cli.main(words) == 0
    return folder


@pytest.fixture
def copied(theirs, tmp_path) -> LocalPath:
    return LocalPath(shutil.copytree(theirs, tmp_path / "step-2"))


def write(folder: LocalPath, **state: Any) -> LocalPath:
    """Write a state with torch's DCP."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def opened(folder: LocalPath) -> TorchTitanCheckpoint:
    return TorchTitanCheckpoint(LocalPath(folder), FLAVOR.spec, FLAVOR.model_config)


def begin(argv: list[str], path: str, folder: str) -> dict[str, Any]:
    """Start a run from a checkpoint; return how far it is and its whole state."""
    log, lines = keeping_log()
    run = trainer([*argv, f"--checkpoint.initial_load_path={path}"], folder, log)
    describe_start(run)  # as a whole run does
    position = run.step, run.tokens, run.consumed
    return {"position": position, "state": digests(run), "log": "\n".join(lines)}


@pytest.mark.parametrize("form", sample(["folder", "file"], "folder"))
def test_what_is_written_for_torchtitan_goes_on_here_on_another_mesh_with_the_same_bits(
    pool, step, theirs, tmp_path, form
):
    path = theirs.parent
    if form == "file":
        path = tmp_path / "step.pt"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp_to_torch_save(theirs, path)
    wanted = pool.run(begin, [*MOE, RESUMES], f"{step}", f"{tmp_path / 'a'}", world=1)[0]
    argv = [*MOE, RESUMES, "--parallelism.tensor_parallel_degree=2"]
    found = pool.run(begin, argv, f"{path}", f"{tmp_path / 'b'}", world=2)[0]
    assert found["state"] == wanted["state"]
    assert found["position"] == (*wanted["position"][:2], 4)  # its batches have 2 samples
    says(found["log"], f"resumed step 2 from {theirs if form == 'folder' else path}", "sample 4")


@pytest.mark.long
def test_a_stream_begins_anew(train, theirs, tmp_path):
    (tmp_path / "text").mkdir()
    lines = (f'{{"text": "line {number} of a stream that is long enough"}}' for number in range(99))
    (tmp_path / "text/a.jsonl").write_text("\n".join(lines))
    argv = [*MOE, RESUMES, f"--checkpoint.initial_load_path={theirs}"]
    argv += ["--training.dataset=c4_test", f"--training.dataset_path={tmp_path / 'text'}"]
    assert train(argv, tmp_path / "run")[0]["step"] == 3


def test_rotary_weights_and_routers_are_as_torchtitan_has_them(step, theirs, tmp_path):
    ours = load_tensors(step)
    query, gate = "layers.0.attention.wq.weight", "layers.1.moe.router.gate.weight"
    bias, entries = "layers.1.moe.expert_bias", DCPReader(theirs).metadata.state_dict_metadata
    found = {key: torch.ones(entries[key].size) for key in (query, gate, bias)}
    dcp.load(found, checkpoint_id=theirs, no_dist=True)
    halves = ours[f"model.{query}"].unflatten(0, (2, -1, 2)).transpose(1, 2)
    assert torch.equal(found[query], halves.reshape(16, 16))
    alone = str(tmp_path / "alone")
    assert cli.main(["checkpoint", "export", f"{step}", alone, "--format", "dcp"]) == 0
    kept = DCPReader(LocalPath(alone)).metadata.state_dict_metadata.keys()
    assert kept == {key for key, entry in entries.items() if hasattr(entry, "size")}
    assert torch.equal(found[gate], ours["model.layers.1.moe.router.weight"])
    assert not found[bias].any()


def test_a_pickle_of_others_is_refused_by_name_and_never_run(copied, tmp_path):
    class Payload:
        def __reduce__(self) -> Any:
            return os.mkdir, (f"{tmp_path / 'executed'}",)

    for payload in (Payload(), {"state_dict_metadata": [Payload()]}):
        (copied / DCP_METADATA).write_bytes(pickle.dumps(payload))
        with refused(copied / DCP_METADATA, "posix.mkdir"):
            opened(copied)
    assert not (tmp_path / "executed").exists()


def damaged(how: str, name: str) -> Callable[[LocalPath], object]:
    return lambda folder: DAMAGES[how](folder / name)


def quantize(folder: LocalPath) -> None:
    write(folder, **{"norm.weight": torch.zeros(4).to(torch.float8_e4m3fn)})


def bias(folder: LocalPath) -> None:
    write(folder, **{"layers.0.moe.expert_bias": torch.ones(4)})


@pytest.mark.parametrize(
    ("harm", "named"),
    [
        (damaged("truncate", SHARDS), [SHARDS, " bytes"]),
        (damaged("lengthen", SHARDS), [SHARDS, "were written"]),
        (damaged("missing", SHARDS), [SHARDS, "missing"]),
        (damaged("truncate", DCP_METADATA), [DCP_METADATA, "damaged"]),
        (quantize, ["norm.weight", "float8_e4m3fn"]),
        (bias, ["layers.0.moe.expert_bias", "balance"]),
    ],
)
def test_a_damaged_or_quantized_checkpoint_is_named_before_anything_is_built(copied, harm, named):
    opened(copied)
    harm(copied)
    with refused(copied, *named):
        opened(copied)


def test_a_step_that_was_being_written_is_passed_over_or_named(theirs, tmp_path):
    torn = LocalPath(shutil.copytree(theirs, tmp_path / "both/step-9"))
    shutil.copytree(theirs, tmp_path / "both/step-2")
    (torn / DCP_METADATA).unlink()
    assert newest_of(tmp_path / "both").name == "step-2"
    with refused(torn, DCP_METADATA, "earlier step"):
        read_manifest(torn)
    with refused(tmp_path, "manifest.json", DCP_METADATA):  # neither
        read_manifest(tmp_path)


class Odd(torch.Tensor):
    """A class that is not torch's, as those of quantized weights."""


CHANGES: dict[str, tuple[dict[str, torch.Tensor], list[str]]] = {
    "shape": (
        {"norm.weight": torch.zeros(9)},
        ["model.norm.weight", "[9]", "[16]", "exclude_from"],
    ),
    "more": ({"more.weight": torch.zeros(1)}, ["model.more.weight: only in the checkpoint"]),
    "class": ({"norm.weight": torch.zeros(16).as_subclass(Odd)}, ["Odd"]),
    "type": ({"norm.weight": torch.zeros(16, dtype=torch.bfloat16)}, []),
}


def attempts(argv: list[str], folder: str, paths: list[LocalPath]) -> list[str]:
    """Load the weights of each; return what was said."""
    run, said = trainer(argv, folder), []
    for path, exclude in [*((path, []) for path in paths), (paths[0], ["model.norm.weight"])]:
        resume = Resume(path, foreign=opened(path), exclude=exclude)
        try:
            restore(resume, run.state, everyone())
            said.append("")
        except UserError as error:
            said.append(str(error))
    return said


def test_weights_that_do_not_fit_are_named_unless_they_are_excluded(pool, theirs, tmp_path):
    entries = DCPReader(theirs).metadata.state_dict_metadata
    weights = {
        key: torch.zeros(entry.size)
        for key, entry in entries.items()
        if hasattr(entry, "size") and not key.startswith("optimizer.")
    }
    paths = [write(tmp_path / name, **(weights | CHANGES[name][0])) for name in CHANGES]
    *said, excluded = pool.run(attempts, MOE, f"{tmp_path / 'run'}", paths, world=1)[0]
    for found, (_, named) in zip(said, CHANGES.values(), strict=True):
        says(found, *named)
        assert bool(found) == bool(named)
    assert not excluded
    with refused("weights only", "initial_load_model_only = true"):
        _ = opened(paths[0]).progress


def test_states_of_another_optimizer_are_named(begun, theirs, tmp_path):
    argv = [*MOE, RESUMES, f"--checkpoint.initial_load_path={theirs}", "--optimizer.name=SGD"]
    says(begun(argv, tmp_path)["error"], "k_norm.weight.exp_avg: only in the checkpoint")
