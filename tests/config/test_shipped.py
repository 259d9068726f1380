"""Shipped configs are valid on the number of ranks that they are meant for."""

import pytest

from tests.runs import ROOT
from titanlite.cli import main
from titanlite.config.job import job_from
from titanlite.config.layout import Layout
from titanlite.config.load import parse_command_line

MEANT_FOR = {
    "debug": Layout(dp_shard=2),
    "debug_moe": Layout(dp_shard=2, experts=True),
    "debug_pp": Layout(pp=2, dp_shard=2),
    "sft_debug": Layout(dp_shard=2),
    "gpt2_124m": Layout(dp_shard=8),
    "llama_1b": Layout(dp_shard=8),
    "llama_8b": Layout(dp_shard=8),
    "llama_8b_tp": Layout(dp_shard=4, tp=2),
    "llama_8b_128k": Layout(cp=8),
    "llama_70b": Layout(dp_replicate=4, dp_shard=8, tp=8),
    "llama_405b": Layout(dp_shard=64, tp=8),
    "llama_405b_pp": Layout(pp=8, dp_shard=8, tp=8),
    "qwen3_0.6b": Layout(dp_shard=8),
    "qwen3_8b": Layout(dp_shard=8),
    "qwen3_30b_a3b": Layout(dp_shard=64, ep=8, experts=True),
    "qwen3_235b_a22b": Layout(pp=4, dp_shard=16, tp=4, ep=16, experts=True),
}


def test_every_shipped_config_is_in_the_table():
    assert {path.stem for path in (ROOT / "train_configs").glob("*.toml")} == set(MEANT_FOR)


@pytest.mark.parametrize("name", MEANT_FOR)
def test_a_shipped_config_is_valid_at_its_world_size(name):
    line = parse_command_line(["--config", f"{name}.toml"], {})
    given = job_from(line, world=MEANT_FOR[name].world, training=True)
    assert given.layout == MEANT_FOR[name]


LARGER = ["llama_8b_128k", "llama_70b", "llama_405b_pp", "qwen3_30b_a3b"]
PLANNED = [
    pytest.param("debug_pp", marks=pytest.mark.long),
    *(pytest.param(name, marks=pytest.mark.nightly) for name in ("debug_moe", *LARGER)),
]


@pytest.mark.parametrize("name", PLANNED)
def test_a_shipped_config_has_a_plan_and_fits_into_an_h100(name, capsys):
    argv = ["--config", f"{name}.toml", "--world", f"{MEANT_FOR[name].world}"]
    assert main(["plan", *argv, "--gpu", "h100-80g"]) == 0
    assert "It fits" in capsys.readouterr().out
