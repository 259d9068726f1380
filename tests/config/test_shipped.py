"""Shipped configs are valid on the number of ranks that they are meant for."""

from pathlib import Path

import pytest

from tests.lanes import sample
from titanlite.cli import main
from titanlite.config.job import Job, job_from
from titanlite.config.load import parse_command_line
from titanlite.layout import Layout

FOLDER = Path(__file__).parents[2] / "train_configs"
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
PARAMETERS = {
    "llama_1b": 1_235_814_400,
    "llama_8b": 8_030_261_248,
    "llama_8b_tp": 8_030_261_248,
    "llama_8b_128k": 8_030_261_248,
    "llama_70b": 70_553_706_496,
    "llama_405b": 405_853_388_800,
    "llama_405b_pp": 405_853_388_800,
    "qwen3_0.6b": 596_049_920,
    "qwen3_8b": 8_190_735_360,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560,
}


def shipped(name: str) -> Job:
    return job_from(
        parse_command_line(["--config", f"{name}.toml"], {}),
        world=MEANT_FOR[name].world,
        training=True,
    )


def test_every_shipped_config_is_in_the_table():
    assert {path.stem for path in FOLDER.glob("*.toml")} == set(MEANT_FOR)


@pytest.mark.parametrize("name", MEANT_FOR)
def test_a_shipped_config_is_valid_at_its_world_size(name):
    assert shipped(name).layout == MEANT_FOR[name]


PLANNED_IN_CI = ["llama_8b_128k", "llama_70b", "llama_405b", "qwen3_30b_a3b"]


@pytest.mark.parametrize("name", sample(MEANT_FOR, "debug_moe", "debug_pp", long=PLANNED_IN_CI))
def test_a_shipped_config_has_a_plan_and_fits_into_an_h100(name, capsys):
    argv = ["--config", f"{name}.toml", "--world", f"{MEANT_FOR[name].world}"]
    assert main(["plan", *argv, "--gpu", "h100-80g"]) == 0
    assert "It fits" in capsys.readouterr().out


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_state_of_a_rank_takes_less_than_0_4_of_80_gb(name):
    """Parameters, gradients and AdamW's two means, in float32."""
    layout = shipped(name).layout
    assert 16 * PARAMETERS[name] / layout.model_shards < 0.4 * 80e9
