"""Divide a traced step's time by kind of work, from a rank's Chrome trace; the kinds add up to the
step.

On a GPU the device's timeline is divided into computation, communication while nothing is computed,
and gaps while the device is idle. On a CPU it is the main thread's timeline: each operation's own
time, without that of the operations it calls. gloo records no waits, which are part of the gaps."""

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlite.errors import RunFailed

MATMUL = "matrix multiplication"
ATTENTION = "attention"
OTHER = "other computation"
FSDP_COPIES = "copies for sharding"
OPTIMIZER = "optimizer"
NORM = "gradient norm"
COMMUNICATION = "exposed communication"
DATA = "waiting for data"
HOST = "host gaps"
WORK_KINDS = (MATMUL, ATTENTION, OTHER, FSDP_COPIES, NORM, OPTIMIZER, COMMUNICATION, DATA, HOST)

_PHASES = {"data": DATA, "gradient norm": NORM, "optimizer": OPTIMIZER}
"""Names of record_function in the trainer."""
_ON_DEVICE = {
    "data": DATA,
    "gradient norm": NORM,
    r"optimizer|Optimizer\..*": OPTIMIZER,
    "FSDP::.*": FSDP_COPIES,
}
"""The same for kernels, which the profiler attributes only to the innermost name around the launch.
"""
_PRODUCTS = "mm|addmm|bmm|baddbmm|_scaled_mm|_grouped_mm"
_OPERATIONS = (
    (re.compile(r"c10d::|_c10d_functional::|nccl"), COMMUNICATION),
    (re.compile(r"fsdp::|split_with_sizes_copy|chunk_cat"), FSDP_COPIES),
    (re.compile(r"flash|fmha|sdpa|cudnn::fusion|attention", re.IGNORECASE), ATTENTION),
    (re.compile(rf"aten::({_PRODUCTS})$|gemm|nvjet|cutlass|xmma|_mm_"), MATMUL),
    (re.compile(r"aten::|triton|torch-compiled region", re.IGNORECASE), OTHER),
)

Span = tuple[float, float]
"""Start and end, in microseconds."""
Events = list[dict[str, Any]]


@dataclass(frozen=True)
class Breakdown:
    """Seconds of one step on one rank."""

    step: float
    kinds: dict[str, float]
    """Seconds of each of WORK_KINDS; they add up to the step."""
    hidden: float
    """Communication that overlaps with computation (only on a GPU)."""


def read(path: Path) -> Breakdown:
    """Return the mean step of a rank's trace."""
    trace = json.loads(path.read_text())
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    steps = []
    for event in _named(events, r"ProfilerStep#\d+"):
        if event["cat"] == "user_annotation":
            steps.append(_span(event))
    kernels = []
    for event in events:
        if event["cat"] in ("kernel", "gpu_memcpy", "gpu_memset"):
            kernels.append(event)
    if not steps:
        raise RunFailed(f"{path} has no steps")
    if trace.get("deviceProperties") and not kernels:
        raise RunFailed(f"{path} has no kernels of the GPU: may this process use CUPTI?")
    if kernels:
        kinds, hidden = _divide_device(events, kernels, steps)
    else:
        kinds = _divide_main_thread(events, steps)
        hidden = 0.0
    total = sum(end - start for start, end in steps)
    kinds[HOST] = total - sum(kinds[kind] for kind in WORK_KINDS if kind != HOST)
    scale = 1e6 * len(steps)
    return Breakdown(
        total / scale, {kind: kinds[kind] / scale for kind in WORK_KINDS}, hidden / scale
    )


def _divide_main_thread(events: Events, steps: Sequence[Span]) -> dict[str, float]:
    """Return the own time of the operations in the thread that runs the steps, by kind."""
    (thread,) = {event["tid"] for event in _named(events, r"ProfilerStep#\d+")}
    calls = []
    for event in events:
        is_call = not event["name"].startswith("gloo:")  # from start to end of a transfer
        if event["tid"] == thread and is_call and _inside(event, steps):
            calls.append(event)
    kinds = dict.fromkeys(WORK_KINDS, 0.0)
    # The calls that have not returned, by end and kind.
    callers: list[tuple[float, str]] = [(math.inf, HOST)]
    for event in sorted(calls, key=lambda event: (event["ts"], -event["dur"])):
        start, end = _span(event)
        while callers[-1][0] <= start:
            callers.pop()
        caller_end, caller = callers[-1]
        kind = _kind(event["name"], caller)
        kinds[kind] += end - start
        kinds[caller] -= min(end, caller_end) - start
        callers.append((end, kind))
    return kinds


def _divide_device(
    events: Events, kernels: Events, steps: Sequence[Span]
) -> tuple[dict[str, float], float]:
    """Return the device's time by the kind of its kernels, and the time of hidden communication."""
    phases = dict[str, list[Span]]()
    for names, kind in _ON_DEVICE.items():
        phases[kind] = []
        for event in _named(events, names):
            if event["cat"] == "gpu_user_annotation":
                phases[kind].append(_span(event))
    spans: dict[str, list[Span]] = {kind: [] for kind in WORK_KINDS}
    for kernel in kernels:
        if _inside(kernel, steps):
            around = (kind for kind, within in phases.items() if _inside(kernel, within))
            spans[_kind(kernel["name"], next(around, OTHER))].append(_span(kernel))
    communication = spans.pop(COMMUNICATION)
    waits = []
    for event in _named(events, "data"):
        if event["cat"] == "user_annotation" and _inside(event, steps):
            waits.append(_span(event))
    kinds = dict.fromkeys(WORK_KINDS, 0.0)
    busy: list[Span] = []
    # Overlapping time counts once, for the first of: computation, communication, waiting for data.
    for kind, kind_spans in [*spans.items(), (COMMUNICATION, communication), (DATA, waits)]:
        kinds[kind] += _length([*busy, *kind_spans]) - _length(busy)
        busy += kind_spans
    return kinds, _length(communication) - kinds[COMMUNICATION]


def _kind(name: str, caller: str) -> str:
    """Return the kind of an operation: communication anywhere, otherwise the phase it is in,
    otherwise its own kind.
    """
    kind = _PHASES.get(name, "")
    if not kind:
        matching = (kind for pattern, kind in _OPERATIONS if pattern.search(name))
        kind = next(matching, caller)
    if COMMUNICATION in (kind, caller):
        return COMMUNICATION
    if caller in _PHASES.values():
        return caller
    if kind == OTHER and caller != HOST:  # a copy inside attention is attention
        return caller
    return kind


def _named(events: Events, pattern: str) -> Events:
    return [event for event in events if re.fullmatch(pattern, event["name"])]


def _span(event: dict[str, Any]) -> Span:
    return event["ts"], event["ts"] + event["dur"]


def _inside(event: dict[str, Any], spans: Sequence[Span]) -> bool:
    return any(start <= event["ts"] < end for start, end in spans)


def _length(spans: Iterable[Span]) -> float:
    """Return the length of the union of spans."""
    total = 0.0
    reached = -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
