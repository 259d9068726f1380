"""On GPUs, ranks call the same collectives in the same order, and a step waits for the device as
often as stated.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from functools import cache
from typing import Any

import pytest

from tests.gpu import fake_gpu
from tests.gpu.conftest import COMPILE
from tests.gpu.fake_gpu import Event, Ran, Trace, mismatches
from tests.lanes import sample
from tests.runs import ROOT

# steps 2 and 3 are not logged
STEPS = "--training.steps=4 --training.seq_len=64 --training.local_batch_size=4"
MOE = (
    "--config debug_moe.toml --training.global_batch_size=-1 --parallelism.expert_parallel_degree=2"
)
PIPELINE = "--config debug_pp.toml"
SKIPPING = (
    "--fault.on_nonfinite=skip --fault.spike_sigma=6.0 --fault.on_spike=skip --fault.spike_window=2"
)
FLAGS = {"event": 1}
"""The flags of the step before, which bound the host's lead to one step."""
COUNTS = "4"
"""How many numbers the all-to-all of counts sends to each rank: that of its experts."""
READS = {"stream": 1, "D2H of pageable memory": 1}
"""The sizes of an all-to-all."""
ROWS: dict[str, tuple[int, str, dict[str, int]]] = {
    # name: (GPUs, options, waits of a step that is not logged)
    "FSDP": (2, "", FLAGS),
    "HSDP": (4, "--parallelism.data_parallel_replicate_degree=2", FLAGS),
    "resharded over fewer": (4, "--parallelism.fsdp_reshard_after_forward=2", FLAGS),
    "FSDP x tensor parallel": (4, "--parallelism.tensor_parallel_degree=2", FLAGS),
    "FSDP x context parallel": (4, "--parallelism.context_parallel_degree=2", FLAGS),
    "Ulysses": (
        2,
        "--parallelism.context_parallel_degree=2 "
        "--parallelism.context_parallel_rotate_method=ulysses",
        FLAGS,
    ),
    "FSDP x expert parallel": (
        4,
        f"{MOE} --parallelism.fsdp_forward_prefetch=1",
        FLAGS | dict.fromkeys(READS, 4),
    ),
    "expert parallel, recomputed": (
        2,
        f"{MOE} --activation_checkpoint.mode=full",
        FLAGS | dict.fromkeys(READS, 8),
    ),
    "1F1B": (2, PIPELINE, FLAGS),
    "Interleaved1F1B": (
        4,
        f"{PIPELINE} --parallelism.pipeline_parallel_schedule=Interleaved1F1B "
        "--parallelism.pipeline_parallel_degree=4 --model.overrides.n_layers=10",
        FLAGS,
    ),
    "ZBVZeroBubble": (
        2,
        f"{PIPELINE} --parallelism.pipeline_parallel_schedule=ZBVZeroBubble",
        FLAGS,
    ),
    "DualPipeV": (2, f"{PIPELINE} --parallelism.pipeline_parallel_schedule=DualPipeV", FLAGS),
    "float8 gathered": (
        2,
        "--quantize.linear.float8.enable --quantize.linear.float8.enable_fsdp_float8_all_gather "
        "--quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp",
        FLAGS,
    ),
    # FSDP2's own: each gradient comes down, and the norm goes up to be summed.
    "offload": (
        2,
        "--training.enable_cpu_offload",
        {"event": 40, "stream": 1, "H2D of pageable memory": 1},
    ),
    "Muon": (2, "--optimizer.name=Muon", FLAGS),
    "skipping": (2, f"{SKIPPING} --training.steps=6", {"event": 2}),
    "accumulation, bfloat16 state": (
        2,
        "--training.global_batch_size=16 --optimizer.state_dtype=bfloat16",
        FLAGS,
    ),
    "documents": (2, "--training.document_mask", FLAGS),
    "HSDP x tensor parallel": (
        4,
        "--parallelism.data_parallel_replicate_degree=2 --parallelism.tensor_parallel_degree=2",
        FLAGS,
    ),
    "1F1B x FSDP": (4, f"{PIPELINE} --parallelism.data_parallel_shard_degree=2", FLAGS),
    "1F1B x tensor parallel": (4, f"{PIPELINE} --parallelism.tensor_parallel_degree=2", FLAGS),
    "context x tensor parallel": (
        4,
        "--parallelism.context_parallel_degree=2 --parallelism.tensor_parallel_degree=2",
        FLAGS,
    ),
    "expert x tensor parallel": (
        4,
        f"{MOE} --parallelism.tensor_parallel_degree=2",
        FLAGS | dict.fromkeys(READS, 4),
    ),
}


IN_CI = ["FSDP x expert parallel", "Interleaved1F1B"]
"""The others are in the exhaustive lane."""


@pytest.mark.parametrize("row", sample(ROWS, "FSDP", long=IN_CI))
def test_ranks_agree_on_collectives_and_hosts_wait_as_often_as_stated(train_row, row):
    if row == "documents" and not os.environ.get(COMPILE):
        pytest.skip("compiles FlexAttention for minutes: scripts/test_fake_gpu.sh --compile")
    gpus, _, waits = ROWS[row]
    ran = train_row(row)
    assert ran.code == 0, ran.out
    assert len(ran.traces) == gpus
    assert mismatches(ran.traces) == []
    for trace in ran.traces:
        assert trace.step(3).waits() == waits


@pytest.fixture(scope="module")
def train_row(train_on_gpus, tmp_path_factory) -> Any:
    """Return a function that trains a row, once."""

    @cache
    def train(row: str) -> Ran:
        gpus, options, _ = ROWS[row]
        argv = [*STEPS.split(), *options.split()]
        return train_on_gpus(tmp_path_factory.mktemp("row"), gpus, argv)

    return train


COMMUNICATORS = {
    # row: (communicators, those that are used)
    "FSDP": (1, 1),
    "HSDP": (3, 3),
    "resharded over fewer": (3, 2),
    "FSDP x tensor parallel": (3, 3),
    "FSDP x context parallel": (3, 3),
    "FSDP x expert parallel": (3, 3),
    "1F1B": (2, 2),
    "Interleaved1F1B": (6, 6),
}


@pytest.mark.parametrize("row", sample(COMMUNICATORS, long=["FSDP", *IN_CI]))
def test_a_layout_has_so_many_communicators(train_row, row):
    made, used = COMMUNICATORS[row]
    (trace, *_) = train_row(row).traces
    assert len(trace.of("communicator")) == made
    assert len({event.facts["comm"] for event in trace.of("collective", "send", "receive")}) == used


GPU_ONLY = """
import os, torch, torch.distributed as dist
from titanlite.parallel.groups import split

rank = int(os.environ["RANK"])
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
dist.init_process_group("cuda:nccl,cpu:gloo", device_id=device)
for gpu_only in (False, True):
    group = split("a name", torch.tensor([[0], [1]]), gpu_only)
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


@pytest.mark.exhaustive
def test_groups_for_tensors_on_gpus_have_no_gloo_beside_nccl(fake_gpus, tmp_path):
    (tmp_path / "own.py").write_text(GPU_ONLY)
    variables = {**os.environ, **fake_gpu.environment(fake_gpus, tmp_path / "traces", 2)}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command.append(str(tmp_path / "own.py"))
    done = subprocess.run(
        command, env=variables, cwd=ROOT, capture_output=True, text=True, check=True
    )
    for rank in (0, 1):
        assert f"{rank} False has gloo" in done.stdout
        assert f"{rank} True No backend type associated with device type cpu" in done.stdout
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
    """Without it they are gathered one launch before the host waits for the router's counts."""
    (trace, *_) = train_row("FSDP x expert parallel").traces
    launches = gathered = 0
    between = []
    world = trace.step(3).of("collective")[0].facts["comm"]
    for event in trace.step(3).of("launch", "collective"):
        if event.kind == "launch":
            launches += 1
        elif event.name == "all_gather" and event.facts["comm"] != world:
            gathered = launches
        elif event.name == "all_to_all" and event.facts["count"] == COUNTS:
            between.append(launches - gathered)
    assert between and min(between) >= 50


@pytest.mark.exhaustive
def test_a_layer_more_is_so_many_launches_more(train_on_gpus, tmp_path):
    """Forward and backward pass, the optimizer's one for all parameters, and FSDP2's."""
    launches = []
    for layers in (2, 3):
        argv = [*STEPS.split(), f"--model.overrides.n_layers={layers}"]
        (trace,) = train_on_gpus(tmp_path / str(layers), 1, argv).traces
        launches.append(len(trace.step(3).of("launch")))
    assert 70 <= launches[1] - launches[0] <= 85


SAVE = "--checkpoint.enable --checkpoint.interval=2 --checkpoint.async_mode="
ONCE_IN_A_WHILE = {
    "validation, saves and a sample": "--validation.enable --validation.freq=2 "
    f"--validation.steps=2 --generate.at_end {SAVE}disabled",
    "a probe of the network and the replicas, saves from page-locked memory": "--fault.preflight "
    f"--parallelism.data_parallel_replicate_degree=2 {SAVE}async_with_pinned_mem",
}


@pytest.mark.parametrize("what", sample(ONCE_IN_A_WHILE, every=2))
def test_ranks_agree_on_collectives_of_what_happens_between_steps(train_on_gpus, tmp_path, what):
    ran = train_on_gpus(
        tmp_path, 2, [*STEPS.split(), "--generate.tokens=4", *ONCE_IN_A_WHILE[what].split()]
    )
    assert ran.code == 0, ran.out
    assert mismatches(ran.traces) == []


def _trace(*calls: tuple[str, str, str]) -> Trace:
    """Return the trace of a rank that made these calls, on a communicator of two."""
    trace = Trace([Event("communicator", "c", {"ranks": "2"}, "")])
    for kind, name, count in calls:
        facts: dict[str, Any] = {
            "comm": "c",
            "count": count,
            "type": "9",
            "more": "0",
            "from": "0",
            "to": "1",
        }
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


def test_waits_are_counted_by_what_the_host_waits_for():
    copied = {"way": "D2H", "memory": "pageable", "waits": "1"}
    events = [
        Event("wait", "", {"for": "event"}, "3 1 forward"),
        Event("copy", "", copied, "3 2 step"),
    ]
    assert Trace(events).step(3).waits() == Counter({"event": 1, "D2H of pageable memory": 1})
    assert Trace(events).step(2).waits() == Counter()
