"""What the launcher refuses on a machine with GPUs, which these tests only pretend to have."""

import pytest
import torch

from tests.jobs import QUIET, TINY, job
from titanlite.config.load import ConfigError, load, parse_command_line
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
def refused(monkeypatch, tmp_path):
    """Return a function that gives the launcher's refusal of a job on a GPU of 80 GiB, or an empty
    string.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(preflight, "gpu_bytes", lambda: 80 << 30)

    def refusal(argv: list[str], processes: int = 1) -> str:
        try:
            preflight.check_machine(
                job([*argv, f"--job.dump_folder={tmp_path}"], processes), "cuda", processes
            )
        except UserError as error:
            return str(error)
        return ""

    return refusal


def test_the_launcher_opens_no_bucket_to_check_the_start(refused, tmp_path):
    (tmp_path / "was").mkdir()
    (tmp_path / "was/config.toml").write_text('[checkpoint]\nfolder = "no-store://would/raise"\n')
    assert not refused([*TINY, f"--checkpoint.initial_load_path={tmp_path}/was"])


@pytest.mark.parametrize(("host_gib", "processes", "has"), [(200, 1, ""), (200, 4, "49.6")])
def test_offloaded_state_is_compared_with_the_memory_of_the_host(
    refused, monkeypatch, host_gib, processes, has
):
    monkeypatch.setattr(memory, "machine_bytes", lambda: host_gib << 30)
    argv = [*OFFLOADED_8B, f"--parallelism.data_parallel_replicate_degree={processes}"]
    refusal = refused(argv, processes)
    assert f"and a rank has {has} GiB of host memory" in refusal if has else not refusal


def test_more_processes_than_the_machine_has_memory_for_are_refused(monkeypatch):
    monkeypatch.setattr(memory, "machine_bytes", lambda: 23 << 30)
    assert preflight.rank_bytes(job(TINY, 2), "cpu", 2) == (23 << 29) - (400 << 20)
    line = "64 processes need 25.0 GiB before they have a model.* has 23.0 GiB; at most 58 "
    with pytest.raises(UserError, match=line):
        preflight.rank_bytes(job(TINY, 2), "cpu", 64)


def mixture(*parts: str) -> str:
    return f"--training.mixture=[{', '.join(f'{{{part}, weight=0.5}}' for part in parts)}]"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (
            ["--training.dataset=text", "--training.dataset_path=/nope"],
            'training.dataset_path = "/nope"   (command line)\n'
            "      there is no such folder or file",
        ),
        (
            ["--training.dataset=tokens", "--training.dataset_path=/nope"],
            "      there is no such folder or file",
        ),
        (
            ["--training.dataset=txt"],
            'training.dataset = "txt"   (command line)\n      is not a data set; did you',
        ),
        (
            ["--validation.enable", "--validation.dataset=txt"],
            'validation.dataset = "txt"   (command line)\n',
        ),
        (["--model.hf_assets_path=/nope"], "/nope"),
        (
            ["--training.dataset=c4_test", "--training.dataset_path=nope"],
            'training.dataset_path = "nope"   (command line)\n      there is no such folder',
        ),
        (
            [mixture("dataset='python-stdlib'", "dataset='text', dataset_path='/nope'")],
            'training.mixture entry 2.dataset_path = "/nope"   (command line)\n'
            "      there is no such folder or file",
        ),
        (
            [mixture("dataset='txt'", "dataset='python-stdlib'")],
            'training.mixture entry 1.dataset = "txt"   (command line)\n',
        ),
    ],
)
def test_faults_of_keys_and_of_data_are_in_one_list(argv, says):
    line = parse_command_line(["--training.stepz=3", "--model.flavor=8b", *argv], {})
    text = str(ConfigError([*load(line).faults, *preflight.data_faults(load(line))]))
    assert text.startswith("2 configuration errors;") and says in text, text
    assert not preflight.data_faults(load(parse_command_line(["--training.stepz=3"], {})))


@pytest.mark.parametrize("warmup", [10, 11])
def test_a_warmup_that_is_longer_than_the_run_is_told(warmup):
    argv = [*TINY, "--training.steps=10", f"--lr_scheduler.warmup_steps={warmup}"]
    told = (
        f"lr_scheduler.warmup_steps = {warmup} is longer than the run: "
        "the learning rate rises in all 10 steps"
    )
    assert long_warmup(job(argv, 1).config) == told * (warmup > 10)


@pytest.mark.parametrize("missing", ["compiler", "headers"])
def test_compiling_on_a_gpu_without_what_triton_needs_is_one_line(
    refused, monkeypatch, tmp_path, missing
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
        lines = refused([*TINY, f"--{key}"]).splitlines()
        assert len(lines) == 2 and f"{key} = true needs {needed} on a GPU" in lines[1], lines
    assert not refused([*TINY, "--compile.enable", "--compile.backend=aot_eager"])


def test_a_model_that_cannot_be_a_stage_is_named_before_anything_starts(tmp_path):
    """Of the parrot, forward calls its norm in every stage."""
    argv = [*QUIET, "--model.package=parrot", "--model.name=parrot", "--model.flavor=small"]
    options = [*argv, f"--job.dump_folder={tmp_path}", "--parallelism.pipeline_parallel_degree=2"]
    with pytest.raises(UserError) as caught:
        preflight.check_machine(job(options, 2), "cpu", 2)
    assert (
        "parrot cannot run stage 0 of 2 without the others: 'NoneType' object is not callable"
        in str(caught.value)
    )


@pytest.mark.long
def test_memory_of_the_pipeline_rank_with_the_most_is_compared(refused):
    """Half of 8B fits, and all of its blocks on the second rank do not."""
    argv = [*QUIET, "--model.flavor=8B", "--model.overrides.vocab_size=256"]
    argv += ["--parallelism.pipeline_parallel_degree=2", "--training.local_batch_size=2"]
    blocks = [f"layers.{i}" for i in range(32)]
    uneven = [["tok_embeddings"], [*blocks, "norm", "output"]]
    assert not refused(argv, 2)
    refusal = refused([*argv, f"--parallelism.module_fqns_per_model_part={uneven}"], 2)
    assert (
        "104.0 GiB in total, 104.0 GiB on one of the 2 ranks that share them, "
        "and a rank has 80.0 GiB"
    ) in refusal
