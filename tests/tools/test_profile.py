"""A step's time is divided by kind of work, on a GPU's timeline and on a CPU's main thread."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.jobs import TINY, trainer
from tests.messages import refused
from titanlite.data.loader import BatchPrefetcher, MicroBatch
from titanlite.tools.breakdown import (
    ATTENTION,
    COMMUNICATION,
    DATA,
    FSDP_COPIES,
    HOST,
    MATMUL,
    OPTIMIZER,
    OTHER,
    WORK_KINDS,
    Breakdown,
    read,
)

PROFILED = ["--profiling.enable_profiling", "--profiling.profile_freq=5", "--training.steps=5"]


def trace(path: Path, events: str, device: bool = False) -> Path:
    """Write a trace of a step of 1000 microseconds with these events: a line of each has its
    thread or stream, start, duration, category and name, and perhaps a remark.
    """
    dicts = []
    for line in events.strip().splitlines():
        thread, start, duration, kind, name = line.partition(" -- ")[0].split(maxsplit=4)
        times = {"tid": int(thread), "ts": int(start), "dur": int(duration), "ph": "X"}
        dicts.append({"cat": kind, "name": name.strip(), **times})
    path.write_text(json.dumps({"traceEvents": dicts, "deviceProperties": [{}] if device else []}))
    return path


def microseconds(breakdown: Breakdown) -> dict[str, int]:
    return {kind: round(1e6 * seconds) for kind, seconds in breakdown.kinds.items() if seconds}


def test_on_a_gpu_communication_counts_while_nothing_is_computed(tmp_path):
    """As traced on an H100: a kernel is in the innermost annotation only."""
    events = """
        1    0 1000 user_annotation      ProfilerStep#7
        1    0   50 user_annotation      data -- the device is idle in the first 50
        7  100  200 kernel               nvjet_tst_128x256
        7  300  100 kernel               flash_fwd_kernel
        9  200  300 kernel               ncclDevKernel_AllGather_RING_LL -- exposed: 400 to 500
        7  500  100 kernel               elementwise_kernel<add>
        7  600   50 gpu_user_annotation  FSDP::pre_forward (layers.1)
        7  600   30 gpu_memcpy           Memcpy DtoD (Device -> Device)
        7  700  150 gpu_user_annotation  Optimizer.step#AdamW.step
        7  850   50 gpu_user_annotation  optimizer
        7  700  150 kernel               multi_tensor_apply_kernel
        7  850   50 kernel               nvjet_of_muon
        7 -100   50 kernel               nvjet_before_the_step
    """
    breakdown = read(trace(tmp_path / "gpu.json", events, device=True))
    computed = {MATMUL: 200, ATTENTION: 100, OTHER: 100, FSDP_COPIES: 30, OPTIMIZER: 200}
    assert microseconds(breakdown) == {**computed, COMMUNICATION: 100, DATA: 50, HOST: 220}
    assert round(1e6 * breakdown.hidden) == 200 and breakdown.step == 1e-3


def test_on_a_cpu_an_operation_counts_its_own_time(tmp_path):
    events = """
        1   0 1000 user_annotation  ProfilerStep#7
        1 100  500 user_annotation  forward
        1 100  100 cpu_op           aten::linear
        1 120   60 cpu_op           aten::mm
        1 200  100 cpu_op           aten::scaled_dot_product_attention
        1 250   50 cpu_op           aten::copy_
        1 400  100 user_annotation  FSDP::all_gather (layers.0)
        1 420   60 cpu_op           c10d::_allgather_base_
        1 620   10 cpu_op           c10d::alltoall_base_ -- of context parallel
        1 640   10 cpu_op           c10d::send
        1 700  100 user_annotation  optimizer
        1 710   20 cpu_op           aten::mm
        1 740   10 cpu_op           c10d::allreduce_
        2   0  900 cpu_op           aten::mm -- another thread
    """
    computed = {MATMUL: 60, ATTENTION: 100, OTHER: 40, OPTIMIZER: 90}
    expected = {**computed, COMMUNICATION: 90, HOST: 620}
    assert microseconds(read(trace(tmp_path / "cpu.json", events))) == expected


def test_a_trace_without_steps_or_kernels_is_refused(tmp_path):
    with refused("empty.json", "no steps"):
        read(trace(tmp_path / "empty.json", "1 0 1 cpu_op aten::mm"))
    step = "1 0 1000 user_annotation ProfilerStep#7"
    with refused("blind.json", "no kernels"):
        read(trace(tmp_path / "blind.json", step, device=True))


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


@pytest.mark.long
def test_in_a_real_trace_all_kinds_add_up_and_slow_data_is_seen(pool, tmp_path):
    pool.run(slow_data, str(tmp_path), world=2)
    for rank in range(2):
        breakdown = read(tmp_path / f"profile_traces/step-5/rank-{rank}.json")
        assert abs(sum(breakdown.kinds.values()) - breakdown.step) < 1e-9
        assert all(breakdown.kinds[kind] > 0 for kind in WORK_KINDS)
        assert breakdown.kinds[DATA] >= 0.05
