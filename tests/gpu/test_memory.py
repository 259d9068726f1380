"""On GPUs, a step takes the memory that was planned; one that does not fit ends in one line."""

from __future__ import annotations

import pytest

from tests.gpu.fake_gpu import OPTIONS, Trace
from tests.messages import says
from tests.planner.steps import H100, plan_step
from tests.runs import put_driver
from titanlite.config.job import job_from
from titanlite.config.load import parse_command_line
from titanlite.errors import FAILED

MIB = 1 << 20
BLAS = 64 * MIB
"""cuBLAS's workspaces on an H100, 32 MiB for each thread that multiplies matrices; not planned."""
SIZE = (
    "--model.overrides.dim=1024 --model.overrides.n_heads=16 --model.overrides.n_kv_heads=4 "
    "--model.overrides.hidden_dim=3072 --model.overrides.n_layers=4 "
    "--model.overrides.vocab_size=32000 "
    "--training.seq_len=2048 --training.local_batch_size=1 --training.steps=3"
).split()


def planned_peak(argv: list[str], gpus: int) -> int:
    """Return the bytes that are planned for a step on fake GPUs."""
    line = parse_command_line([*OPTIONS, *argv], {})
    return plan_step(job_from(line, world=gpus, training=True, device="cuda")).peak


def peaks(trace: Trace) -> tuple[int, int]:
    """Return the most bytes that a rank's tensors took, and that its allocator reserved."""
    (mark,) = [event.name for event in trace.of("mark") if event.name.startswith("peak")]
    _, allocated, reserved = mark.split()
    return int(allocated), int(reserved)


WIDE = (
    "--model.flavor=8B --model.overrides.n_layers=8 --training.seq_len=8192 "
    "--training.local_batch_size=1 --activation_checkpoint.mode=full --training.steps=3"
).split()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("gpus", "expected"), [(4, H100.reserve.allocator), (1, H100.reserve.allocator_alone)]
)
def test_the_allocator_takes_what_hardware_toml_says(train_on_gpus, tmp_path, gpus, expected):
    """Eight layers of Llama 8B's width, recomputed: of the models that were measured this one has
    the largest share beside its peak.
    """
    for trace in train_on_gpus(tmp_path, gpus, WIDE).traces:
        allocated, reserved = peaks(trace)
        assert expected == pytest.approx(reserved / allocated, abs=0.02)


@pytest.mark.long
@pytest.mark.parametrize(
    ("gpus", "more"),
    [
        (1, ""),
        (2, "--parallelism.data_parallel_replicate_degree=2"),
        (2, "--parallelism.context_parallel_degree=2"),
        (2, "--optimizer.state_on=host"),
    ],
)
def test_the_planned_peak_is_that_of_the_allocator(train_on_gpus, tmp_path, gpus, more):
    argv = [*SIZE, *more.split()]
    planned = planned_peak(argv, gpus)
    for trace in train_on_gpus(tmp_path, gpus, argv).traces:
        allocated, reserved = peaks(trace)
        assert abs(allocated - BLAS - planned) < 0.1 * MIB
        assert reserved > allocated


DRIVER = """case $1 in
  *=name) echo NVIDIA {name};;
  *=memory.total) echo {mebibytes};;
esac
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "mebibytes", "value"), [("H100", 81559, "never"), ("A100-SXM4", 40960, "default")]
)
def test_auto_gathers_again_only_where_keeping_does_not_fit(
    train_on_gpus, tmp_path, monkeypatch, name, mebibytes, value
):
    put_driver(tmp_path, DRIVER.format(name=name, mebibytes=mebibytes), monkeypatch)
    argv = [*WIDE, "--model.overrides.n_layers=10"]
    ran = train_on_gpus(tmp_path, 2, [*argv, "--parallelism.fsdp_reshard_after_forward=auto"])
    says(ran.out, f'"auto" is "{value}": a step with "never" needs')
    gathers = {"never": 12, "default": 22}[value]  # of ten blocks, the embedding and the head
    for trace in ran.traces:
        calls = [event.name for event in trace.step(2).of("collective")]
        assert calls.count("all_gather") == gathers
    assert 'after_forward = "auto"' in (ran.folder / "config.toml").read_text()


@pytest.mark.long
def test_a_step_that_does_not_fit_ends_with_one_line(train_on_gpus, tmp_path):
    ran = train_on_gpus(tmp_path, 1, SIZE, code=FAILED, FAKE_GPU_GIB="1.5")
    assert "Traceback" not in ran.out
    last = ran.out.strip().splitlines()[-1]
    says(last, "titanlite: step 1", "activation_checkpoint, ", "CUDA out of memory")
