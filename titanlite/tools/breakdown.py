"""Where the time of a traced step went, from a rank's chrome trace; the kinds of a step add up to it.

On a GPU the device's timeline is divided: what its kernels computed, communication that nothing was computed beside,
and the gaps in which it had nothing to do. On a CPU it is the main thread's: the time that each operation took
itself, waiting for a collective included.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlite.errors import UserError

MATMUL, ATTENTION, OTHER = "matrix multiplication", "attention", "other computation"
SHARDING, OPTIMIZER, NORM = "copies for sharding", "optimizer", "gradient norm"
COMMUNICATION, DATA, HOST = "exposed communication", "waiting for data", "host gaps"
KINDS = (MATMUL, ATTENTION, OTHER, SHARDING, NORM, OPTIMIZER, COMMUNICATION, DATA, HOST)

_PHASES = {"data": DATA, "gradient norm": NORM, "optimizer": OPTIMIZER}
"""record_function names of the trainer."""
_OPERATIONS = (
    (re.compile(r"c10d::|_c10d_functional::|gloo:|nccl"), COMMUNICATION),
    (re.compile(r"fsdp::|split_with_sizes_copy|chunk_cat"), SHARDING),
    (re.compile(r"flash|fmha|sdpa|attention", re.IGNORECASE), ATTENTION),
    (re.compile(r"aten::(mm|addmm|bmm|baddbmm|_scaled_mm|_grouped_mm)$|gemm|nvjet|cutlass|xmma|_mm_"), MATMUL),
    (re.compile(r"aten::|triton|torch-compiled region", re.IGNORECASE), OTHER),
)

Span = tuple[float, float]
"""From and to, in microseconds."""


@dataclass(frozen=True)
class Breakdown:
    """Seconds of one step."""

    step: float
    kinds: dict[str, float]
    """By KINDS; they add up to the step."""
    hidden: float
    """Communication beside which something was computed (known on a GPU)."""


def read(path: Path) -> Breakdown:
    """The mean step of a rank's trace."""
    trace = json.loads(path.read_text())
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    steps = [_span(event) for event in _named(events, r"ProfilerStep#\d+") if event["cat"] == "user_annotation"]
    kernels = [event for event in events if event["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not steps or (trace.get("deviceProperties") and not kernels):
        raise UserError(f"{path} has no {'kernels of the GPU: may this process use CUPTI?' if steps else 'steps'}")
    kinds, hidden = _of_device(events, kernels, steps) if kernels else _of_main_thread(events, steps)
    total = sum(end - start for start, end in steps)
    kinds[HOST] = total - sum(kinds[kind] for kind in KINDS if kind != HOST)
    scale = 1e6 * len(steps)
    return Breakdown(total / scale, {kind: kinds[kind] / scale for kind in KINDS}, hidden / scale)


def _of_main_thread(events: list[dict[str, Any]], steps: Sequence[Span]) -> tuple[dict[str, float], float]:
    """What each operation of the thread that takes the steps took itself, by its kind or that of what called it."""
    (thread,) = {event["tid"] for event in _named(events, r"ProfilerStep#\d+")}
    mine = [event for event in events if event["tid"] == thread and _inside(event, steps)]
    found = dict.fromkeys(KINDS, 0.0)
    open_calls: list[tuple[float, str]] = []  # when each ends, and its kind
    at = 0.0
    for event in sorted(mine, key=lambda event: (event["ts"], -event["dur"])):
        start, end = _span(event)
        while open_calls and open_calls[-1][0] <= start:
            until, kind = open_calls.pop()
            found[kind] += max(0.0, until - at)
            at = max(at, until)
        if open_calls:
            found[open_calls[-1][1]] += max(0.0, start - at)
        at = max(at, start)
        open_calls.append((end, _kind(event["name"], open_calls[-1][1] if open_calls else HOST)))
    for until, kind in reversed(open_calls):
        found[kind] += max(0.0, until - at)
        at = max(at, until)
    return found, 0.0


def _of_device(
    events: list[dict[str, Any]], kernels: list[dict[str, Any]], steps: Sequence[Span]
) -> tuple[dict[str, float], float]:
    """The device's time by the kind of its kernels; communication counts where nothing else runs."""
    phases = {
        kind: [_span(event) for event in _named(events, re.escape(name)) if event["cat"] == "gpu_user_annotation"]
        for name, kind in _PHASES.items()
    }
    spans: dict[str, list[Span]] = {kind: [] for kind in KINDS}
    for kernel in kernels:
        if _inside(kernel, steps):
            phase = next((kind for kind, these in phases.items() if _inside(kernel, these)), OTHER)
            spans[_kind(kernel["name"], phase)].append(_span(kernel))
    communication = spans.pop(COMMUNICATION)
    found = dict.fromkeys(KINDS, 0.0)
    busy: list[Span] = []
    for kind, these in spans.items():  # what runs at once counts once
        found[kind] = _length([*busy, *these]) - _length(busy)
        busy += these
    computed, all_of_it = _length(busy), _length([*busy, *communication])
    found[COMMUNICATION] = all_of_it - computed
    waiting = [_span(e) for e in _named(events, "data") if e["cat"] == "user_annotation" and _inside(e, steps)]
    found[DATA] = _length([*busy, *communication, *waiting]) - all_of_it
    return found, _length(communication) - found[COMMUNICATION]


def _kind(name: str, around: str) -> str:
    """Communication is that everywhere; what a phase does is its own; then the operation decides."""
    own = _PHASES.get(name) or next((kind for pattern, kind in _OPERATIONS if pattern.search(name)), around)
    if own == COMMUNICATION or around == COMMUNICATION:
        return COMMUNICATION
    if around in _PHASES.values():
        return around
    # An operation inside of one that is known belongs to that: a copy inside of attention is attention.
    return around if own == OTHER and around != HOST else own


def _named(events: Iterable[dict[str, Any]], pattern: str) -> list[dict[str, Any]]:
    return [event for event in events if re.fullmatch(pattern, event["name"])]


def _span(event: dict[str, Any]) -> Span:
    return event["ts"], event["ts"] + event["dur"]


def _inside(event: dict[str, Any], spans: Sequence[Span]) -> bool:
    return any(start <= event["ts"] < end for start, end in spans)


def _length(spans: Iterable[Span]) -> float:
    """Of the union."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
