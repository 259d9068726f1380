"""Qwen 3, dense and with experts: published sizes, and training."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.jobs import QUIET, run_to_end
from titanlite.models.qwen3 import FLAVORS, SPEC, QwenConfig, active_parameters, parameters
from titanlite.observe.throughput import flops_per_token
from titanlite.parallel.build import build_meta_model
from titanlite.parallel.init import materialize
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
SMALL = QwenConfig(
    32, 2, 4, 2, 48, expert_dim=25, experts=4, top_k=2, head_dim=16, vocab_size=99, max_seq_len=256
)
QWEN = [*QUIET, "--model.name=qwen3"]


def test_flavors_have_the_published_parameter_counts():
    assert {
        name: parameters(flavor) for name, flavor in FLAVORS.items() if "debug" not in name
    } == PUBLISHED
    for name in ("0.6B", "8B", "30B-A3B"):  # what is counted is what is built
        model, _ = build_meta_model(SPEC, FLAVORS[name])
        assert sum(p.numel() for p in model.parameters()) == PUBLISHED[name]


@pytest.mark.parametrize(("flavor", "billions"), [("30B-A3B", 3.35), ("235B-A22B", 22.19)])
def test_active_parameters_are_what_the_names_say(flavor, billions):
    model, table = build_meta_model(SPEC, FLAVORS[flavor])
    active = sum(round(p.numel() * table[name].active) for name, p in model.named_parameters())
    assert active_parameters(FLAVORS[flavor]) == active and round(active / 1e9, 2) == billions


def test_flops_equal_the_flop_counter():
    """Experts count as far as a token meets them; the sum of their outputs, a product too, is left
    out.
    """
    model, table = build_meta_model(SPEC, SMALL, 64)
    materialize(model, table, 0, torch.device("cpu"))
    tokens = torch.randint(99, (2, 32), generator=torch.Generator().manual_seed(0))
    math = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    with math, FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    expected = flops_per_token(model.named_parameters(), table, SPEC.shape(SMALL), 32)
    sums = 6 * SMALL.n_layers * SMALL.top_k * SMALL.dim
    assert counter.get_total_flops() == (expected + sums) * tokens.numel()


@pytest.mark.parametrize("flavor", ["debugmodel", "debugmodel_moe"])
def test_one_process_trains(pool, tmp_path, flavor):
    argv = [*QWEN, f"--model.flavor={flavor}", "--training.steps=20", "--optimizer.lr=3e-3"]
    done = pool.run(run_to_end, argv, str(tmp_path), world=1)[0]
    losses = [float(line.split("loss:")[1].split()[0]) for line in done["log"] if "loss:" in line]
    says = f"model      qwen3 {flavor}, {parameters(FLAVORS[flavor]):,} parameters"
    says += ", 660,864 active: " if flavor == "debugmodel_moe" else ": "
    assert any(line.startswith(says) for line in done["start"]), done["start"]
    assert done["step"] == 20 and losses[-1] < losses[0] - 1


def test_paths_of_experts_are_those_of_the_table():
    assert expert_paths(SPEC.rules(FLAVORS["debugmodel_moe"]), SPEC.blocks) == ("moe.experts",)
    assert expert_paths(SPEC.rules(FLAVORS["debugmodel"]), SPEC.blocks) == ()
