"""The configs that ship are sound at the size that they are meant for."""

from pathlib import Path

import pytest

from titanlite.config.job import Job, job_from
from titanlite.config.load import parse_command_line
from titanlite.layout import Layout

FOLDER = Path(__file__).parents[2] / "train_configs"
MEANT_FOR = {
    "debug": Layout(dp_shard=2),
    "gpt2_124m": Layout(dp_shard=8),
    "llama_1b": Layout(dp_shard=8),
    "llama_8b": Layout(dp_shard=8),
    "llama_8b_tp": Layout(dp_shard=4, tp=2),
    "llama_70b": Layout(dp_replicate=4, dp_shard=8, tp=8),
    "llama_405b": Layout(dp_shard=64, tp=8),
}
PARAMETERS = {
    "llama_1b": 1_235_814_400,
    "llama_8b": 8_030_261_248,
    "llama_8b_tp": 8_030_261_248,
    "llama_70b": 70_553_706_496,
    "llama_405b": 405_853_388_800,
}


def shipped(name: str) -> Job:
    return job_from(parse_command_line(["--config", f"{name}.toml"], {}), world=MEANT_FOR[name].world, training=True)


def test_every_config_that_ships_is_judged_here():
    assert {path.stem for path in FOLDER.glob("*.toml")} == set(MEANT_FOR)


@pytest.mark.parametrize("name", MEANT_FOR)
def test_a_shipped_config_is_sound_at_its_intended_world_size(name):
    assert shipped(name).layout == MEANT_FOR[name]


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_rank_of_80_gb_holds_its_part_of_the_state_with_room_for_activations(name):
    """Parameters, gradients and AdamW's two means, in float32."""
    layout = shipped(name).layout
    assert 16 * PARAMETERS[name] / layout.splits < 0.4 * 80e9
