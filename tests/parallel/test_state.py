"""What ranks of any mesh save, load, resume and export is what one process does."""

from __future__ import annotations

import re
from typing import Any
from unittest.mock import patch

import pytest
import torch

import titanlite
from tests.checkpoint.layouts import LAYOUTS, save_and_load_everywhere
from tests.checkpoint.saved import SAVING, digests, joined, run_until
from tests.checkpoint.test_load import refused
from tests.jobs import MOE, TINY, run_to_end, trainer
from tests.lanes import sample
from tests.messages import says
from tests.parallel.rows import (
    CP,
    EP,
    EP4,
    EVEN,
    FREEZE,
    GPT2,
    HSDP,
    INTERLEAVED,
    PP,
    TP,
    ZBV,
    Row,
    cut_and_straight,
)
from tests.train.test_rank_facts import log_of_start
from titanlite.checkpoint.load import load_tensors
from titanlite.checkpoint.manifest import read_manifest, read_state
from titanlite.cli import main
from titanlite.parallel.parallelize import build_parts

SAVES = SAVING[len(TINY) :]
NARROW = "--optimizer.state_dtype=bfloat16"
DROPOUT, DEEP = "--model.overrides.dropout=0.2", "--model.overrides.n_layers=4"
FOUR_SAMPLES = "--training.local_batch_size=4"
TIE = "tok_embeddings.weight"
MODELS = {"gpt2": [*GPT2, DROPOUT], "llama": [*EVEN, DEEP]}
RESUMED = {
    "stages": Row("gpt2", 2, PP),
    "cp": Row("gpt2", 2, CP),
    "stages, tp": Row("gpt2", 4, f"{PP} {TP} {NARROW} {FREEZE}['layers.1.*']"),
    "stages in a V": Row("llama", 2, f"{PP} {ZBV} {NARROW} --checkpoint.async_mode=disabled"),
}


@pytest.mark.parametrize("name", sample(RESUMED, "stages", nightly=["stages, tp"]))
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(pool, tmp_path, name):
    """With dropout in GPT-2, which also has the same embedding on its first and last stage."""
    row = RESUMED[name]
    argv = [*MODELS[row.model], *SAVES, FOUR_SAMPLES, "--training.steps=4", *row.words.split()]
    cut, straight = cut_and_straight(pool, argv, tmp_path, 3, row.ranks)
    assert joined(cut) == joined(straight)
    tied = {f"model.{TIE}", f"optimizer.{TIE}.exp_avg"}
    assert all(state.keys() >= tied for state in cut) == (row.model == "gpt2")


STAGES = {
    "pp2dp2": (4, [PP]),
    "pp2 x replicas": (4, [PP, HSDP]),
    "pp2 interleaved": (2, [PP, INTERLEAVED]),
}
EXPERTS = {
    "ep4": (4, [EP4]),
    "ep2 over dp2tp2": (4, [EP, TP]),
    "pp2 x ep2": (4, [PP, EP]),
    "dp3": (3, []),
}
MESHES = [
    pytest.param([*GPT2, DEEP, FOUR_SAMPLES], STAGES, id="stages", marks=pytest.mark.long),
    pytest.param(
        [*MOE, "--model.overrides.experts=12"], EXPERTS, id="experts", marks=pytest.mark.nightly
    ),
]


@pytest.mark.parametrize(("model", "layouts"), MESHES)
def test_state_saved_on_any_mesh_loads_on_any_other(pool, tmp_path, model, layouts):
    """Expert weights are split on dimension 0 by ep, and strided by FSDP2."""
    layouts = {name: LAYOUTS[name] for name in ("one", "tp2")} | layouts
    assert save_and_load_everywhere(pool, tmp_path, layouts, model) == []


def log_of_a_start_with_dropout_in_blocks(argv: list[str], folder: str) -> list[str]:
    def build(*arguments: Any) -> Any:
        parts, notes = build_parts(*arguments)
        for part in parts:
            part.dropout = torch.nn.Identity()
        return parts, notes

    with patch("titanlite.train.trainer.build_parts", build):
        return log_of_start(argv, folder)


@pytest.mark.long
def test_a_change_of_dropout_masks_in_later_stages_is_in_the_log_of_all_ranks(pool, tmp_path):
    """The first stage has no block."""
    stages = "[['tok_embeddings','pos_embeddings'],['layers.0','layers.1','norm','output']]"
    argv = [*GPT2, *SAVES, DROPOUT, PP, f"--parallelism.module_fqns_per_model_part={stages}"]
    argv.append(FOUR_SAMPLES)
    pool.run(run_until, [*argv, "--training.steps=1"], str(tmp_path), world=2)
    changed = [*argv, "--training.steps=2", "--parallelism.pipeline_parallel_microbatch_size=2"]
    start = log_of_a_start_with_dropout_in_blocks
    for lines in pool.run(start, changed, str(tmp_path), world=2):
        assert any(line.startswith("dropout masks") for line in lines)


def loaded(argv: list[str], folder: str) -> dict[str, Any]:
    return digests(trainer(argv, folder))


@pytest.mark.long
def test_the_last_export_of_stages_starts_stages_and_one_process(pool, tmp_path):
    argv = [*GPT2, PP]
    saving = ["--checkpoint.enable", "--checkpoint.last_save_in_hf", "--training.steps=2"]
    pool.run(run_to_end, [*argv, *saving], str(tmp_path / "run"), world=4)
    path = f"--checkpoint.initial_load_path={tmp_path}/run/checkpoint/hf-step-2"
    argv += ["--checkpoint.initial_load_in_hf", path]
    states = pool.run(loaded, argv, str(tmp_path / "from_hf"), world=4)
    whole = pool.run(loaded, [*GPT2, *argv[-2:]], str(tmp_path / "whole"), world=1)[0]
    assert joined(states) == whole


@pytest.mark.long
def test_the_room_that_checkpoints_of_stages_need_is_that_of_the_whole_model(pool, tmp_path):
    argv, sizes = [*EVEN, *SAVES, "--checkpoint.keep_latest_k=1000000000"], set[str]()
    for world, words in ((1, []), (2, [PP])):
        folder = str(tmp_path / str(world))
        lines = pool.run(log_of_start, [*argv, *words], folder, world=world)[0]
        (warning,) = [line for line in lines if "room for" in line]
        sizes |= {*re.findall(r"more checkpoints of (.*);", warning)}
    assert len(sizes) == 1


@pytest.mark.long
def test_a_checkpoint_that_does_not_fit_a_later_stage_is_refused_on_every_rank(pool, tmp_path):
    pool.run(run_until, [*GPT2, *SAVES, "--training.steps=1"], str(tmp_path), world=1)
    source, wider = str(tmp_path / "checkpoint"), [*GPT2, PP, "--model.overrides.n_layers=3"]
    for message, untouched in pool.run(refused, wider, str(tmp_path), source, [], world=2):
        says(message, "model.layers.2.attention.wk.weight", "not in the checkpoint")
        assert untouched


@pytest.mark.long
def test_a_checkpoint_of_stages_is_a_model_in_one_process(pool, tmp_path, capsys):
    """For `titanlite.load` and all commands, which see no stages. Weights alone are saved."""
    argv = [*GPT2, *SAVES, PP, "--training.steps=1", "--checkpoint.last_save_model_only"]
    ranks = pool.run(run_until, argv, str(tmp_path / "run"), world=4)
    state = joined([rank["state"] for rank in ranks])
    saved = {name: digest for name, digest in state.items() if name.startswith("model.")}
    folder = tmp_path / "run/checkpoint/step-1"
    tensors = load_tensors(folder)
    assert tensors.keys() == saved.keys() and read_state(folder)["numbers"] == {}
    model, _ = titanlite.load(folder)
    for name, value in model.named_parameters():
        assert torch.equal(value, tensors[f"model.{name}"]), name
    placements = {entry.placement for entry in read_manifest(folder).tensors.values()}
    assert placements == {"dim 0 over dp_shard"}
    for words in (
        ["checkpoint", "verify", folder],
        ["checkpoint", "show", folder],
        ["checkpoint", "export", folder, tmp_path / "hf"],
        ["generate", "--checkpoint", folder, "--generate.tokens", "3"],
        ["checkpoint", "diff", folder, folder],
    ):
        assert main([str(word) for word in words]) == 0
    says(capsys.readouterr().out, "layers.1.")
