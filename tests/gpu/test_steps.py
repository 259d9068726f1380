"""On GPUs, ranks call the same collectives in the same order, and a step waits for the device as
often as stated.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest

from tests.gpu import fake_gpu
from tests.gpu.fake_gpu import Event, Ran, Trace, mismatches
from tests.lanes import sample
from tests.messages import says

# steps 2 and 3 are not logged
STEPS = "--training.steps=4 --training.seq_len=64 --training.local_batch_size=4"
MOE = (
    "--config debug_moe.toml --training.global_batch_size=-1 --parallelism.expert_parallel_degree=2"
)
PIPELINE = (
    "--config debug_pp.toml --parallelism.pipeline_parallel_schedule=Interleaved1F1B "
    "--parallelism.pipeline_parallel_degree=4 --model.overrides.n_layers=10"
)
SKIPPING = (
    "--fault.on_nonfinite=skip --fault.spike_sigma=6.0 --fault.on_spike=skip --fault.spike_window=2"
)
FLAGS = {"event": 1}
"""The flags of the step before, which bound the host's lead to one step."""
COUNTS = "4"
"""How many numbers the all-to-all of counts sends to each rank: that of its experts."""
READS = {"stream": 4, "D2H of pageable memory": 4}
"""The sizes of an all-to-all, in each of four layers."""
OFFLOADED = {"event": 40, "stream": 1, "H2D of pageable memory": 1}
"""FSDP2's own: each gradient comes down. The norm goes up to be watched."""
ROWS: dict[str, tuple[int, str, dict[str, int], int]] = {
    # name: (GPUs, options, waits of a step that is not logged, communicators)
    "FSDP": (2, "", FLAGS, 1),
    "FSDP x expert parallel": (
        4,
        f"{MOE} --parallelism.fsdp_forward_prefetch=1",
        FLAGS | READS,
        3,
    ),
    "Interleaved1F1B": (4, PIPELINE, FLAGS, 6),
    "offload": (2, "--training.enable_cpu_offload", OFFLOADED, 1),
    "state on the host": (2, "--optimizer.state_on=host", FLAGS, 1),
    "skipping": (2, f"{SKIPPING} --training.steps=6", {"event": 2}, 1),
    "own reductions": (
        2,
        "--parallelism.fsdp_separate_reduce_scatter_group",
        FLAGS,
        2,
    ),
    "documents": (2, "--training.document_mask", FLAGS, 1),
}

UNUSED = {"Interleaved1F1B": 1}
"""Communicators of the one rank that has its data, which nothing uses without FSDP2."""


@pytest.fixture(scope="module")
def train_row(train_on_gpus, tmp_path_factory) -> Any:
    """Return a function that trains a row, once."""

    @cache
    def train(row: str) -> Ran:
        gpus, options, *_ = ROWS[row]
        argv = [*STEPS.split(), *options.split()]
        return train_on_gpus(tmp_path_factory.mktemp("row"), gpus, argv)

    return train


SAMPLED = ["FSDP x expert parallel", "Interleaved1F1B"]
NIGHTLY = [pytest.param(row, marks=pytest.mark.nightly) for row in ROWS if row not in SAMPLED]


@pytest.mark.parametrize("row", [*sample(SAMPLED), *NIGHTLY])
def test_ranks_agree_on_collectives_and_hosts_wait_as_often_as_stated(train_row, row):
    gpus, _, waits, communicators = ROWS[row]
    traces = train_row(row).traces
    assert len(traces) == gpus
    assert mismatches(traces) == []
    for trace in traces:
        assert trace.step(3).waits() == waits
        assert len(trace.of("communicator")) == communicators
        called = trace.of("collective", "send", "receive")
        used = communicators - UNUSED.get(row, 0)
        assert len({event.facts["comm"] for event in called}) == used


GPU_ONLY = """
import os, torch, torch.distributed as dist
from titanlite.parallel.mesh import new_groups

rank = int(os.environ["RANK"])
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
dist.init_process_group("cuda:nccl,cpu:gloo", device_id=device)
for gpu_only in (False, True):
    group = new_groups("a name", torch.tensor([[0], [1]]), gpu_only)
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    try:
        dist.all_reduce(torch.zeros(1), group=group)
        found = "has gloo"
    except RuntimeError as error:
        found = str(error)
    # One write: print makes more, and the ranks share the output.
    os.write(1, f"{rank} {gpu_only} {found}\\n".encode())
dist.destroy_process_group()
"""


@pytest.mark.nightly
def test_groups_for_tensors_on_gpus_have_no_gloo_beside_nccl(fake_gpus, tmp_path):
    script = tmp_path / "own.py"
    script.write_text(GPU_ONLY)
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node=2")
    code, out = fake_gpu.program(fake_gpus, tmp_path, 2, *torchrun, script)
    assert code == 0, out
    for rank in (0, 1):
        says(out, f"{rank} False has gloo", f"{rank} True No backend")
    for trace in fake_gpu.read_traces(tmp_path / "traces"):
        assert len(trace.of("communicator")) == 3
        assert not trace.of("split-without-color")


@pytest.mark.long
def test_each_edge_of_a_pipeline_has_a_communicator_and_a_stream_of_its_own(train_row):
    """A send that waits for its receiver would stop all that comes after it in its stream."""
    senders = Counter[str]()
    for trace in train_row("Interleaved1F1B").traces:
        operations = trace.step(3).of("send", "receive")
        lanes = {(event.kind, event.facts["comm"]) for event in operations}
        streams = {(event.facts["comm"], event.facts["stream"]) for event in operations}
        assert [kind for kind, _ in sorted(lanes)] == ["receive"] * 2 + ["send"] * 2
        assert len({comm for _, comm in lanes}) == len({stream for _, stream in streams}) == 4
        senders.update(comm for kind, comm in lanes if kind == "send")
    assert {*senders.values()} == {1}
    assert len(senders) == 8


@pytest.mark.long
def test_experts_are_gathered_while_their_block_computes_by_prefetch(train_row):
    """From before its attention; else from one launch before the host waits for their counts."""
    (trace, *_) = train_row("FSDP x expert parallel").traces
    step = trace.step(3)
    world = step.of("collective")[0].facts["comm"]
    attended = False
    beside: list[bool] = []
    for event in step.of("launch", "collective"):
        if event.kind == "launch":
            attended = attended or "flash_fwd" in event.name
        elif event.name == "all_gather" and event.facts["comm"] != world:
            attended = False
        elif event.name == "all_to_all" and event.facts["count"] == COUNTS:
            beside.append(attended)
    assert beside == [True] * 4


@pytest.mark.nightly
def test_a_layer_more_is_so_many_launches_more(train_on_gpus, tmp_path):
    """Forward and backward pass, the optimizer's one for all parameters, and FSDP2's."""
    launches = []
    for layers in (2, 3):
        argv = [*STEPS.split(), f"--model.overrides.n_layers={layers}"]
        (trace,) = train_on_gpus(tmp_path / str(layers), 1, argv).traces
        launches.append(len(trace.step(3).of("launch")))
    assert 70 <= launches[1] - launches[0] <= 85


BETWEEN_STEPS = (
    "--validation.enable --validation.freq=2 --validation.steps=2 --generate.at_end "
    "--generate.tokens=4 --fault.preflight --parallelism.data_parallel_replicate_degree=2 "
    "--checkpoint.enable --checkpoint.interval=2 --checkpoint.async_mode=async_with_pinned_mem"
)


@pytest.mark.long
def test_ranks_agree_on_collectives_of_what_happens_between_steps(train_on_gpus, tmp_path):
    ran = train_on_gpus(tmp_path, 2, [*STEPS.split(), *BETWEEN_STEPS.split()])
    assert mismatches(ran.traces) == []


def _trace(*calls: tuple[str, str, str]) -> Trace:
    """Return the trace of a rank that made these calls, on a communicator of two."""
    trace = Trace([Event("communicator", "c", {"ranks": "2"}, "")])
    for kind, name, count in calls:
        facts = {"comm": "c", "count": count, "type": "9", "more": "0", "from": "0", "to": "1"}
        trace.events.append(Event(kind, name, facts, ""))
    return trace


GATHER, REDUCE = ("collective", "all_gather", "8"), ("collective", "all_reduce", "8")


@pytest.mark.parametrize(
    ("calls", "others", "words"),
    [
        ([GATHER, REDUCE], [REDUCE, GATHER], "c, collective 0"),
        ([GATHER], [("collective", "all_gather", "16")], "all_gather of 16"),
        ([GATHER, REDUCE], [GATHER], "'nothing'"),
        ([GATHER], [], "only [0] called"),
        ([("send", "", "8")], [], "+1 sends without a receive"),
        ([("send", "", "8")], [("receive", "", "4")], "-1 sends without a receive"),
    ],
)
def test_what_ranks_do_not_have_in_common_is_found(calls, others, words):
    assert words in " ".join(mismatches([_trace(*calls), _trace(*others)]))
    assert mismatches([_trace(*calls), _trace(*calls)]) == [] or calls[0][0] == "send"
