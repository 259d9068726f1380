"""TorchTitan's TOML files load unchanged; features that titanlite lacks are refused by name."""

from pathlib import Path

import pytest

from tests.messages import refused, says
from titanlite.cli import main
from titanlite.config.job import job_from
from titanlite.config.load import ConfigError, load_config, parse_command_line

FILES = Path(__file__).parent / "torchtitan"


def resolve(*argv: str):
    return job_from(parse_command_line([*argv], {}), world=None, training=False)


RESOLVES = {  # file: the smallest number of ranks, and the model
    "debug": (1, "llama3 debugmodel"),
    "8b": (1, "llama3 8B"),
    "70b": (8, "llama3 70B"),
    "405b": (8, "llama3 405B"),
    "qwen3_0.6b": (1, "qwen3 0.6B"),
    "qwen3_1.7b": (1, "qwen3 1.7B"),
    "qwen3_32b": (1, "qwen3 32B"),
    "qwen3_moe_debug": (1, "qwen3 debugmodel_moe"),
}


@pytest.mark.parametrize("file", RESOLVES)
def test_a_v022_file_resolves(file):
    job = resolve("--config", str(FILES / f"{file}.toml"))
    assert (job.layout.world, f"{job.spec.name} {job.config.model.flavor}") == RESOLVES[file]


def test_the_float8_converter_switches_its_section_on():
    assert resolve("--config", str(FILES / "405b.toml")).config.quantize.linear.float8.enable
    assert resolve("--model.converters=['float8']").config.quantize.linear.float8.enable
    assert resolve("--model.converters=quantize.linear.float8").config.quantize.linear.float8.enable
    with refused("model.converters", '"mx"', kind=ConfigError):
        resolve("--model.converters=mx")


def test_custom_import_is_the_old_spelling_of_package():
    job = resolve(
        "--experimental.custom_import=parrot", "--model.name=parrot", "--model.flavor=small"
    )
    assert job.spec.name == "parrot"


@pytest.mark.parametrize(
    ("argv", "instead"),
    [
        ("--fault_tolerance.enable", "TorchFT"),
        ("--checkpoint.enable_checkpoint", "checkpoint.enable here"),
        ("--checkpoint.create_seed_checkpoint", "every mesh"),
        ("--training.seed=1", "debug.seed here"),
        ("--float8.filter_fqns=output", "[quantize.linear.float8] here"),
        ("--parallelism.expert_tensor_parallel_degree=2", "splits experts"),
        ("--parallelism.expert_parallel_comm_backend=deepep", "all-to-all"),
        ("--metrics.save_for_all_ranks", "log file"),
        ("--memory_estimation.enable", "titanlite plan"),
    ],
)
def test_a_key_that_titanlite_lacks_names_what_to_use_instead(argv, instead):
    with refused(argv.removeprefix("--").split("=")[0], instead, kind=ConfigError):
        resolve(argv)


@pytest.mark.parametrize(
    "argv",
    [
        "--fault_tolerance.enable=false",
        "--fault_tolerance.group_size=2",
        "--memory_estimation.enable=false",
        "--parallelism.expert_tensor_parallel_degree=1",
        "--parallelism.expert_parallel_comm_backend=standard",
    ],
)
def test_a_key_that_switches_a_feature_off_is_accepted(argv):
    assert resolve(argv)


def test_torchtitans_debug_config_is_said_to_be_of_another_model(tmp_path):
    def notices(*argv: str) -> str:
        return "\n".join(load_config(parse_command_line([*argv], {})).notices)

    plain = tmp_path / "plain.toml"
    plain.write_text('[model]\nflavor = "debugmodel"\n')
    for words in (("--config", f"{FILES / 'debug.toml'}"), ("--job.config_file", f"{plain}")):
        says(notices(*words), "model.flavor", "dim 256, 6 layers", "128")
    assert not notices("--config", f"{plain}") and not notices("--job.config_file", "debug.toml")


def test_keys_that_do_not_count_are_named(capsys):
    given = ["--mx.recipe=x", "--fault_tolerance.none=1", "--training.steps=4", "--debug.seed=1"]
    given += ["--training.steps=5", "--debug.seed=1"]
    twice, foreign = load_config(parse_command_line(given, {})).notices
    says(twice, "training.steps = 5")
    assert "debug.seed" not in twice  # the same value
    says(foreign, "no effect", "mx.recipe", "fault_tolerance.none")
    assert main(["config", *given]) == 0
    says(capsys.readouterr().out, f"# {twice}\n", f"# {foreign}\n")
