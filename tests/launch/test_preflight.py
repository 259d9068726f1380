"""What the launcher refuses on a machine with GPUs, which these tests only pretend to have."""

import pytest
import torch

from tests.jobs import QUIET, TINY, job
from titanlite.errors import UserError
from titanlite.launch import preflight
from titanlite.observe import memory

OFFLOADED_8B = [*QUIET, "--model.flavor=8B", "--model.overrides.vocab_size=256", "--training.enable_cpu_offload"]
"""Without its vocabulary it takes 104 GiB."""


@pytest.fixture
def refused(monkeypatch, tmp_path):
    """Return a function that gives the launcher's refusal of a job on a GPU of 80 GiB, or an empty string."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(preflight, "gpu_bytes", lambda: 80 << 30)

    def refusal(argv: list[str], processes: int = 1) -> str:
        try:
            preflight.check_machine(job([*argv, f"--job.dump_folder={tmp_path}"], processes), "cuda", processes)
        except UserError as error:
            return str(error)
        return ""

    return refusal


@pytest.mark.parametrize(("host_gib", "processes", "has"), [(200, 1, ""), (200, 4, "50.0")])
def test_offloaded_state_is_compared_with_the_memory_of_the_host(refused, monkeypatch, host_gib, processes, has):
    monkeypatch.setattr(memory, "machine_bytes", lambda: host_gib << 30)
    argv = [*OFFLOADED_8B, f"--parallelism.data_parallel_replicate_degree={processes}"]
    refusal = refused(argv, processes)
    assert f"and a rank has {has} GiB of host memory" in refusal if has else not refusal


@pytest.mark.parametrize("missing", ["compiler", "headers"])
def test_compiling_on_a_gpu_without_what_triton_needs_is_one_line(refused, monkeypatch, tmp_path, missing):
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
