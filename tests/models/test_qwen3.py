"""Qwen 3, dense and with experts: published sizes, and training."""

import pytest
import torch

from tests.jobs import QUIET, run_to_end
from titanlite.models.qwen3 import FLAVORS, SPEC
from titanlite.registry import expert_paths

PUBLISHED = {
    "0.6B": 596_049_920,
    "1.7B": 1_720_574_976,
    "4B": 4_022_468_096,
    "8B": 8_190_735_360,
    "14B": 14_768_307_200,
    "32B": 32_762_123_264,
    "30B-A3B": 30_532_122_624,
    "235B-A22B": 235_093_634_560,
}
QWEN = [*QUIET, "--model.name=qwen3"]


@pytest.mark.parametrize("flavor", PUBLISHED)
def test_flavor_has_the_published_parameter_count(flavor):
    with torch.device("meta"):
        model = SPEC.module(FLAVORS[flavor], 16)
    assert sum(p.numel() for p in model.parameters()) == PUBLISHED[flavor]
    assert SPEC.parameters and SPEC.parameters(FLAVORS[flavor]) == PUBLISHED[flavor]


@pytest.mark.parametrize("flavor", ["debugmodel", "debugmodel_moe"])
def test_one_process_trains(pool, tmp_path, flavor):
    argv = [*QWEN, f"--model.flavor={flavor}", "--training.steps=20", "--optimizer.lr=3e-3"]
    done = pool.run(run_to_end, argv, str(tmp_path), world=1)[0]
    losses = [float(line.split("loss:")[1].split()[0]) for line in done["log"] if "loss:" in line]
    assert done["step"] == 20 and losses[-1] < losses[0] - 1


def test_paths_of_experts_are_those_of_the_table():
    assert expert_paths(SPEC.rules(FLAVORS["debugmodel_moe"]), SPEC.blocks) == ("moe.experts",)
    assert expert_paths(SPEC.rules(FLAVORS["debugmodel"]), SPEC.blocks) == ()
