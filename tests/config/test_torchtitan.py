"""TorchTitan's TOML files load unchanged; features that titanlite lacks are refused by name."""

from pathlib import Path

import pytest

from titanlite.config.job import job_from
from titanlite.config.load import ConfigError, parse_command_line

FILES = Path(__file__).parent / "torchtitan"


def resolve(*argv: str, training: bool = False):
    return job_from(parse_command_line(list(argv), {}), world=None, training=training)


RESOLVES = [("debug", 1, "debugmodel"), ("8b", 1, "8B"), ("70b", 8, "70B"), ("405b", 16, "405B")]
RESOLVES += [("qwen3_0.6b", 1, "0.6B"), ("qwen3_1.7b", 1, "1.7B"), ("qwen3_32b", 1, "32B")]


@pytest.mark.parametrize(
    ("file", "ranks", "flavor"), [*RESOLVES, ("qwen3_moe_debug", 1, "debugmodel_moe")]
)
def test_a_v022_file_resolves(file, ranks, flavor):
    job = resolve("--config", str(FILES / f"{file}.toml"))
    assert job.layout.world == ranks
    assert job.config.model.flavor == flavor and job.spec.name == (
        "qwen3" if "qwen3" in file else "llama3"
    )


def test_the_float8_converter_switches_its_section_on():
    assert resolve("--config", str(FILES / "405b.toml")).config.quantize.linear.float8.enable
    assert resolve("--model.converters=['float8']").config.quantize.linear.float8.enable
    with pytest.raises(ConfigError, match='no converter is registered as "mx"'):
        resolve("--model.converters=['mx']")


def test_custom_import_is_the_old_spelling_of_package():
    job = resolve(
        "--experimental.custom_import=parrot", "--model.name=parrot", "--model.flavor=small"
    )
    assert job.spec.name == "parrot"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("--fault_tolerance.enable", "TorchFT is not supported"),
        ("--checkpoint.enable_checkpoint", "spelled checkpoint.enable here"),
        ("--checkpoint.create_seed_checkpoint", "the same on every mesh"),
        ("--training.seed=1", "spelled debug.seed here"),
        ("--float8.filter_fqns=output", "spelled [quantize.linear.float8] here"),
        ("--parallelism.expert_tensor_parallel_degree=2", "tensor parallel never splits experts"),
        ("--parallelism.expert_parallel_comm_backend=deepep", "by torch's all-to-all"),
        ("--metrics.save_for_all_ranks", "every rank has its log file"),
    ],
)
def test_a_key_that_titanlite_lacks_names_what_to_use_instead(argv, says):
    with pytest.raises(ConfigError) as caught:
        resolve(argv)
    assert says in str(caught.value)


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
