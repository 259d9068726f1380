"""A step's time is divided by kind of work, on a GPU's timeline and on a CPU's main thread."""

from __future__ import annotations

import json
import time

import pytest

from tests.jobs import TINY, trainer
from titanlite.cli import main
from titanlite.data.loader import BatchPrefetcher, MicroBatch
from titanlite.errors import UserError
from titanlite.tools.breakdown import (
    ATTENTION,
    COMMUNICATION,
    DATA,
    HOST,
    KINDS,
    MATMUL,
    NORM,
    OPTIMIZER,
    OTHER,
    SHARDING,
    read,
)  # fmt: skip

PROFILED = ["--profiling.enable_profiling", "--profiling.profile_freq=5", "--training.steps=5"]


def trace(path, *events: tuple[str, str, int, int, int], device: bool) -> None:
    """Write a trace of events (category, name, thread or stream, start, duration), times in
    microseconds.
    """
    dicts = [
        dict(zip(("cat", "name", "tid", "ts", "dur"), event, strict=True)) | {"ph": "X"}
        for event in events
    ]
    path.write_text(json.dumps({"traceEvents": dicts, "deviceProperties": [{}] if device else []}))


def test_on_a_gpu_communication_counts_while_nothing_is_computed(tmp_path):
    trace(
        tmp_path / "gpu.json",
        ("user_annotation", "ProfilerStep#7", 1, 0, 1000),
        ("user_annotation", "data", 1, 0, 50),  # the device is idle in the first 50
        ("kernel", "nvjet_tst_128x256", 7, 100, 200),
        ("kernel", "flash_fwd_kernel", 7, 300, 100),
        (
            "kernel",
            "ncclDevKernel_AllGather_RING_LL",
            9,
            200,
            300,
        ),  # 100 of 300 exposed: 400 to 500
        ("kernel", "elementwise_kernel<add>", 7, 500, 100),
        ("gpu_user_annotation", "FSDP::pre_forward (layers.1)", 7, 600, 50),
        ("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 7, 600, 30),
        # As traced on an H100: a kernel is in the innermost annotation only.
        ("gpu_user_annotation", "Optimizer.step#AdamW.step", 7, 700, 150),
        ("gpu_user_annotation", "optimizer", 7, 850, 50),
        ("kernel", "multi_tensor_apply_kernel", 7, 700, 150),
        ("kernel", "nvjet_of_muon", 7, 850, 50),
        ("kernel", "nvjet_before_the_step", 7, -100, 50),
        device=True,
    )
    breakdown = read(tmp_path / "gpu.json")
    expected = {
        MATMUL: 200, ATTENTION: 100, OTHER: 100, SHARDING: 30, NORM: 0, OPTIMIZER: 200,
        COMMUNICATION: 100, DATA: 50, HOST: 220,
    }  # fmt: skip
    assert {kind: round(1e6 * seconds) for kind, seconds in breakdown.kinds.items()} == expected
    assert round(1e6 * breakdown.hidden) == 200 and breakdown.step == 1e-3


def test_on_a_cpu_an_operation_counts_its_own_time(tmp_path):
    trace(
        tmp_path / "cpu.json",
        ("user_annotation", "ProfilerStep#7", 1, 0, 1000),
        ("user_annotation", "forward", 1, 100, 500),
        ("cpu_op", "aten::linear", 1, 100, 100),
        ("cpu_op", "aten::mm", 1, 120, 60),
        ("cpu_op", "aten::scaled_dot_product_attention", 1, 200, 100),
        ("cpu_op", "aten::copy_", 1, 250, 50),
        ("user_annotation", "FSDP::all_gather (layers.0)", 1, 400, 100),
        ("cpu_op", "c10d::_allgather_base_", 1, 420, 60),
        ("cpu_op", "c10d::alltoall_base_", 1, 620, 10),  # of context parallel
        ("cpu_op", "c10d::send", 1, 640, 10),
        ("user_annotation", "optimizer", 1, 700, 100),
        ("cpu_op", "aten::mm", 1, 710, 20),
        ("cpu_op", "c10d::allreduce_", 1, 740, 10),
        ("cpu_op", "aten::mm", 2, 0, 900),  # another thread
        device=False,
    )
    breakdown = read(tmp_path / "cpu.json")
    expected = {
        MATMUL: 60, ATTENTION: 100, OTHER: 40, SHARDING: 0, NORM: 0, OPTIMIZER: 90,
        COMMUNICATION: 90, DATA: 0, HOST: 620,
    }  # fmt: skip
    assert {kind: round(1e6 * seconds) for kind, seconds in breakdown.kinds.items()} == expected


def test_on_a_cpu_waiting_for_what_other_ranks_send_is_communication(tmp_path):
    trace(
        tmp_path / "pipeline.json",
        ("user_annotation", "ProfilerStep#7", 1, 0, 1000),
        ("cpu_op", "c10d::send", 1, 100, 10),
        ("user_annotation", "gloo:send", 1, 105, 300),  # ends while the main thread computes
        ("cpu_op", "aten::mm", 1, 150, 300),
        ("cpu_op", "c10d::recv_", 1, 500, 10),
        ("user_annotation", "gloo:recv", 1, 505, 195),  # waited for until 700
        ("cpu_op", "aten::mm", 1, 720, 80),
        ("cpu_op", "c10d::alltoall_base_", 1, 800, 10),
        (
            "user_annotation",
            "gloo:all_to_all",
            2,
            805,
            95,
        ),  # in a thread of gloo, waited for until 900
        ("cpu_op", "aten::mm", 1, 920, 30),
        device=False,
    )
    found = read(tmp_path / "pipeline.json").kinds
    kinds = {kind: round(1e6 * seconds) for kind, seconds in found.items() if seconds}
    assert kinds == {MATMUL: 300 + 80 + 30, COMMUNICATION: 10 + 200 + 100, HOST: 1000 - 410 - 310}


def test_a_trace_without_steps_or_kernels_is_refused(tmp_path):
    trace(tmp_path / "empty.json", ("cpu_op", "aten::mm", 1, 0, 1), device=False)
    with pytest.raises(UserError, match="has no steps"):
        read(tmp_path / "empty.json")
    trace(tmp_path / "blind.json", ("user_annotation", "ProfilerStep#7", 1, 0, 1000), device=True)
    with pytest.raises(UserError, match="no kernels of the GPU"):
        read(tmp_path / "blind.json")


def slow_data(folder: str) -> None:
    original = BatchPrefetcher.__next__

    def slowly(self: BatchPrefetcher) -> MicroBatch:
        time.sleep(0.05)
        return original(self)

    BatchPrefetcher.__next__ = slowly  # type: ignore[method-assign]
    try:
        trainer([*TINY, *PROFILED], folder).train()
    finally:
        BatchPrefetcher.__next__ = original  # type: ignore[method-assign]


def test_in_a_real_trace_all_kinds_add_up_and_slow_data_is_seen(pool, tmp_path):
    pool.run(slow_data, str(tmp_path), world=2)
    for rank in range(2):
        breakdown = read(tmp_path / f"profile_traces/step-5/rank-{rank}.json")
        assert (
            abs(sum(breakdown.kinds.values()) - breakdown.step) < 1e-9
            and min(breakdown.kinds.values()) >= 0
        )
        assert all(breakdown.kinds[kind] > 0 for kind in KINDS)
        assert breakdown.kinds[DATA] >= 0.05


def test_profile_refuses_an_invalid_config(capsys):
    assert main(["profile", "--training.stepz", "5"]) == 2
    assert "did you mean training.steps?" in capsys.readouterr().err
