"""Qwen 3, dense and with experts: active parameters, and training."""

import pytest

from tests.jobs import QUIET, run_to_end
from tests.runs import losses
from titanlite.models.qwen3 import FLAVORS, SPEC, active_parameters, parameters
from titanlite.parallel.build import build_meta_model
from titanlite.registry import expert_paths


@pytest.mark.parametrize(("flavor", "billions"), [("30B-A3B", 3.35), ("235B-A22B", 22.19)])
def test_active_parameters_are_what_the_names_say(flavor, billions):
    model, table = build_meta_model(SPEC, FLAVORS[flavor])
    active = sum(round(p.numel() * table[name].active) for name, p in model.named_parameters())
    assert active_parameters(FLAVORS[flavor]) == active and round(active / 1e9, 2) == billions


@pytest.mark.parametrize(
    ("flavor", "experts", "active"),
    [("debugmodel", (), ""), ("debugmodel_moe", ("moe.experts",), ", 660,864 active")],
)
def test_one_process_trains(pool, tmp_path, flavor, experts, active):
    assert expert_paths(SPEC.rules(FLAVORS[flavor]), SPEC.blocks) == experts
    argv = [*QUIET, "--model.name=qwen3", f"--model.flavor={flavor}", "--training.steps=20"]
    argv += ["--optimizer.lr=3e-3", "--metrics.log_freq=1"]
    start = pool.run(run_to_end, argv, str(tmp_path), world=1)[0]["start"]
    size = f"qwen3 {flavor}, {parameters(FLAVORS[flavor]):,} parameters{active}: "
    assert any(size in line for line in start), start
    found = losses(tmp_path)
    assert found[20] < found[1] - 1
