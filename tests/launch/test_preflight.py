"""What the launcher refuses on a machine with GPUs, which these tests only pretend to have."""

import pytest
import torch

from tests.jobs import MOE, PARROT, QUIET, TINY, job
from tests.messages import refused, says
from titanlite.config.load import ConfigError, load_config, parse_command_line
from titanlite.config.rules.run import long_warmup
from titanlite.errors import UserError
from titanlite.launch import preflight
from titanlite.observe import memory

OFFLOADED_8B = [
    *QUIET,
    "--model.flavor=8B",
    "--model.overrides.vocab_size=256",
    "--training.enable_cpu_offload",
]
"""Without its vocabulary it takes 104 GiB."""


@pytest.fixture
def refusal(monkeypatch, tmp_path):
    """Return a function that gives the launcher's refusal of a job on a GPU of 80 GiB, or an empty
    string.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(preflight, "gpu_bytes", lambda: 80 << 30)

    def refusal_of(argv: list[str], processes: int = 1) -> str:
        try:
            preflight.check_machine(
                job([*argv, f"--job.dump_folder={tmp_path}"], processes), "cuda", processes
            )
        except UserError as error:
            return str(error)
        return ""

    return refusal_of


def test_the_launcher_opens_no_bucket_to_check_the_start(refusal, tmp_path):
    (tmp_path / "was").mkdir()
    (tmp_path / "was/config.toml").write_text('[checkpoint]\nfolder = "no-store://would/raise"\n')
    assert not refusal([*TINY, f"--checkpoint.initial_load_path={tmp_path}/was"])


@pytest.mark.parametrize(("processes", "has"), [(1, ""), (4, "49.6 GiB")])
def test_offloaded_state_is_compared_with_the_memory_of_the_host(
    refusal, monkeypatch, processes, has
):
    monkeypatch.setattr(memory, "machine_bytes", lambda: 200 << 30)
    argv = [*OFFLOADED_8B, f"--parallelism.data_parallel_replicate_degree={processes}"]
    found = refusal(argv, processes)
    says(found, has)
    assert bool(found) == bool(has)


def test_more_processes_than_the_machine_has_memory_for_are_refused(monkeypatch):
    monkeypatch.setattr(memory, "machine_bytes", lambda: 23 << 30)
    assert preflight.rank_bytes(job(TINY, 2), "cpu", 2) == (23 << 29) - (400 << 20)
    with refused("64 processes", "25.0 GiB", "23.0 GiB", "at most 58 "):
        preflight.rank_bytes(job(TINY, 2), "cpu", 64)


AUTO = "--parallelism.fsdp_reshard_after_forward=auto"


@pytest.mark.parametrize(
    ("ranks", "more", "device", "chosen"),
    [
        (1, [], "cuda", ("", "")),
        (2, ["--parallelism.pipeline_parallel_degree=2"], "cuda", ("", "")),
        (2, [], "cpu", ("default", "a CPU")),
        (2, [], "cuda", ("default", "Abacus is unknown")),
    ],
)
def test_auto_says_what_it_assumes_where_no_step_can_be_planned(
    monkeypatch, ranks, more, device, chosen
):
    monkeypatch.setattr(preflight, "gpu_name", lambda: "Abacus")
    monkeypatch.setattr(preflight, "gpu_bytes", lambda: 80 << 30)
    value, why = preflight.choose_resharding(job([*TINY, AUTO, *more], ranks), device)
    assert value == chosen[0]
    says(why, chosen[1])


KEPT = "parallelism.fsdp_keep_whole"


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ([f"--{KEPT}=['*router*']"], "*router*"),
        ([f"--{KEPT}=['*']"], "every parameter"),
        ([*MOE, f"--{KEPT}=['*experts*']", "--parallelism.tensor_parallel_degree=2"], "moe.exp"),
        ([*MOE, f"--{KEPT}=['*experts*']"], ""),
    ],
)
def test_parameters_that_cannot_stay_whole_are_refused_before_ranks_start(refusal, argv, named):
    found = refusal([*TINY, *argv], 2)
    says(found, *[KEPT, named] * bool(named))
    assert bool(found) == bool(named)


def mixture(*parts: str) -> str:
    return f"--training.mixture=[{', '.join(f'{{{part}, weight=0.5}}' for part in parts)}]"


ABSENT = 'dataset_path = "/nope"'
UNKNOWN = 'dataset = "txt"'


@pytest.mark.parametrize(
    ("argv", "key"),
    [
        (["--training.dataset=c4_test", "--training.dataset_path=/nope"], f"training.{ABSENT}"),
        (["--training.dataset=txt"], f"training.{UNKNOWN}"),
        (["--validation.enable", "--validation.dataset=txt"], f"validation.{UNKNOWN}"),
        (["--model.hf_assets_path=/nope"], "/nope"),
        (
            [mixture("dataset='python-stdlib'", "dataset='text', dataset_path='/nope'")],
            f"training.mixture entry 2.{ABSENT}",
        ),
        (
            [mixture("dataset='txt'", "dataset='python-stdlib'")],
            f"training.mixture entry 1.{UNKNOWN}",
        ),
    ],
)
def test_faults_of_keys_and_of_data_are_in_one_list(argv, key):
    line = parse_command_line(["--training.stepz=3", "--model.flavor=8b", *argv], {})
    text = str(ConfigError([*load_config(line).faults, *preflight.file_faults(load_config(line))]))
    says(text, "2 configuration errors", key, "(command line)")
    assert not preflight.file_faults(load_config(parse_command_line(["--training.stepz=3"], {})))


@pytest.mark.parametrize("warmup", [10, 11])
def test_a_warmup_that_is_longer_than_the_run_is_told(warmup):
    argv = [*TINY, "--training.steps=10", f"--lr_scheduler.warmup_steps={warmup}"]
    told = long_warmup(job(argv, 1).config)
    says(told, *["lr_scheduler.warmup_steps = 11", "10 steps"] * (warmup > 10))
    assert bool(told) == (warmup > 10)


@pytest.mark.parametrize("missing", ["compiler", "headers"])
def test_compiling_on_a_gpu_without_what_triton_needs_is_one_line(
    refusal, monkeypatch, tmp_path, missing
):
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CC", "CPATH", "C_INCLUDE_PATH"):
        monkeypatch.delenv(name, raising=False)
    if missing == "headers":
        monkeypatch.setenv("CC", "cc")
        monkeypatch.setattr(preflight.sysconfig, "get_path", lambda _: str(tmp_path))
    else:
        monkeypatch.setenv("CPATH", str(tmp_path))
    needed = {"compiler": "a C compiler", "headers": f"{tmp_path}/Python.h"}[missing]
    for key in ("compile.enable", "training.document_mask"):
        _, line = refusal([*TINY, f"--{key}"]).splitlines()
        says(line, f"{key} = true", needed)
    assert not refusal([*TINY, "--compile.enable", "--compile.backend=aot_eager"])


def test_a_model_that_cannot_be_a_stage_is_named_before_anything_starts(tmp_path):
    """Of the parrot, forward calls its norm in every stage."""
    argv = [*PARROT, f"--job.dump_folder={tmp_path}", "--parallelism.pipeline_parallel_degree=2"]
    with refused("parrot", "stage 0 of 2", "'NoneType'"):
        preflight.check_machine(job(argv, 2), "cpu", 2)


@pytest.mark.long
def test_memory_of_the_pipeline_rank_with_the_most_is_compared(refusal):
    """Half of 8B fits, and all of its blocks on the second rank do not."""
    argv = [word for word in OFFLOADED_8B if "offload" not in word]
    argv += ["--parallelism.pipeline_parallel_degree=2", "--training.local_batch_size=2"]
    blocks = [f"layers.{i}" for i in range(32)]
    uneven = [["tok_embeddings"], [*blocks, "norm", "output"]]
    assert not refusal(argv, 2)
    found = refusal([*argv, f"--parallelism.module_fqns_per_model_part={uneven}"], 2)
    says(found, "104.0 GiB", "the 2 ranks", "80.0 GiB")
