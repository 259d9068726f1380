"""Divide a traced step's time by kind of work, from a rank's chrome trace; the kinds add up to the
step.

On a GPU the device's timeline is divided: computation, communication while nothing is computed, and
gaps while the device is idle. On a CPU the main thread's is: each operation's own time without that
of the operations it calls. gloo records no wait: what a rank waits for is in the gaps."""

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlite.errors import RunFailed

MATMUL, ATTENTION, OTHER = "matrix multiplication", "attention", "other computation"
SHARDING, OPTIMIZER, NORM = "copies for sharding", "optimizer", "gradient norm"
COMMUNICATION, DATA, HOST = "exposed communication", "waiting for data", "host gaps"
KINDS = (MATMUL, ATTENTION, OTHER, SHARDING, NORM, OPTIMIZER, COMMUNICATION, DATA, HOST)

_PHASES = {"data": DATA, "gradient norm": NORM, "optimizer": OPTIMIZER}
"""Names of record_function in the trainer."""
_ON_DEVICE = {
    "data": DATA,
    "gradient norm": NORM,
    r"optimizer|Optimizer\..*": OPTIMIZER,
    "FSDP::.*": SHARDING,
}
"""The same for kernels: the profiler gives each to the innermost name around its launch alone."""
_OPERATIONS = (
    (re.compile(r"c10d::|_c10d_functional::|nccl"), COMMUNICATION),
    (re.compile(r"fsdp::|split_with_sizes_copy|chunk_cat"), SHARDING),
    (re.compile(r"flash|fmha|sdpa|cudnn::fusion|attention", re.IGNORECASE), ATTENTION),
    (
        re.compile(
            r"aten::(mm|addmm|bmm|baddbmm|_scaled_mm|_grouped_mm)$|gemm|nvjet|cutlass|xmma|_mm_"
        ),
        MATMUL,
    ),
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
    """By KINDS; they add up to the step."""
    hidden: float
    """Communication during which something is computed (on a GPU only)."""


def read(path: Path) -> Breakdown:
    """Return the mean step of a rank's trace."""
    trace = json.loads(path.read_text())
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    steps = [
        _span(event)
        for event in _named(events, r"ProfilerStep#\d+")
        if event["cat"] == "user_annotation"
    ]
    kernels = [event for event in events if event["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not steps or (trace.get("deviceProperties") and not kernels):
        raise RunFailed(
            f"{path} has no "
            f"{'kernels of the GPU: may this process use CUPTI?' if steps else 'steps'}"
        )
    kinds, hidden = (
        _divide_device(events, kernels, steps)
        if kernels
        else (_divide_main_thread(events, steps), 0.0)
    )
    total = sum(end - start for start, end in steps)
    kinds[HOST] = total - sum(kinds[kind] for kind in KINDS if kind != HOST)
    scale = 1e6 * len(steps)
    return Breakdown(total / scale, {kind: kinds[kind] / scale for kind in KINDS}, hidden / scale)


def _divide_main_thread(events: Events, steps: Sequence[Span]) -> dict[str, float]:
    """Return the own time of the operations in the thread that runs the steps, by kind."""
    (thread,) = {event["tid"] for event in _named(events, r"ProfilerStep#\d+")}
    calls = []
    for event in events:
        is_call = not event["name"].startswith("gloo:")  # from start to end of a transfer
        if event["tid"] == thread and is_call and _inside(event, steps):
            calls.append(event)
    kinds = dict.fromkeys(KINDS, 0.0)
    # The calls that have not returned: end and kind.
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
    phases = {
        kind: [
            _span(event) for event in _named(events, names) if event["cat"] == "gpu_user_annotation"
        ]
        for names, kind in _ON_DEVICE.items()
    }
    spans: dict[str, list[Span]] = {kind: [] for kind in KINDS}
    for kernel in kernels:
        if _inside(kernel, steps):
            phase = next(
                (kind for kind, phase_spans in phases.items() if _inside(kernel, phase_spans)),
                OTHER,
            )
            spans[_kind(kernel["name"], phase)].append(_span(kernel))
    communication = spans.pop(COMMUNICATION)
    waits = [
        _span(e)
        for e in _named(events, "data")
        if e["cat"] == "user_annotation" and _inside(e, steps)
    ]
    kinds = dict.fromkeys(KINDS, 0.0)
    busy: list[Span] = []
    # Time that is covered twice counts once, for the first of: computation, communication, waiting
    # for data.
    for kind, kind_spans in [*spans.items(), (COMMUNICATION, communication), (DATA, waits)]:
        kinds[kind] += _length([*busy, *kind_spans]) - _length(busy)
        busy += kind_spans
    return kinds, _length(communication) - kinds[COMMUNICATION]


def _kind(name: str, caller: str) -> str:
    """Return the kind of an operation: communication anywhere, else the phase it is in, else the
    operation's own.
    """
    kind = _PHASES.get(name) or next(
        (kind for pattern, kind in _OPERATIONS if pattern.search(name)), caller
    )
    if COMMUNICATION in (kind, caller):
        return COMMUNICATION
    if caller in _PHASES.values():
        return caller
    # A copy inside attention is attention.
    return caller if kind == OTHER and caller != HOST else kind


def _named(events: Events, pattern: str) -> Events:
    return [event for event in events if re.fullmatch(pattern, event["name"])]


def _span(event: dict[str, Any]) -> Span:
    return event["ts"], event["ts"] + event["dur"]


def _inside(event: dict[str, Any], spans: Sequence[Span]) -> bool:
    return any(start <= event["ts"] < end for start, end in spans)


def _length(spans: Iterable[Span]) -> float:
    """Return the length of the union of spans."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
