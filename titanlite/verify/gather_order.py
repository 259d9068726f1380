"""The order of the all-gathers by FSDP group: what the prefetch schedule declares, and what FSDP2 did.

FSDP2 names the group of each all-gather in profiler traces (tried on torch 2.11, 2.13 and 2.15); the collective's own
arguments don't distinguish blocks.
"""

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise

from torch.profiler import ProfilerActivity, profile

from titanlite.config.job import Job
from titanlite.parallel.fsdp_schedule import schedule

Group = frozenset[str]
ROOT = frozenset(("the root",))
"""FSDP2 gives this group no name."""


@contextmanager
def gathers_recorded(into: list[Group]) -> Iterator[None]:
    """Append the modules of each all-gather to `into`, in the order in which they were issued."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*clears events")  # torch 2.11 says so of longer profiles
        trace = profile(activities=[ProfilerActivity.CPU])
        trace.start()
    try:
        yield
    finally:
        trace.stop()
    assert trace.profiler and trace.profiler.kineto_results
    # The public trace.events() makes an object for each of many thousand events: longer than the row's steps.
    events = trace.profiler.kineto_results.events()
    gathers = [event for event in events if event.name().startswith("FSDP::all_gather")]
    for event in sorted(gathers, key=lambda event: event.start_ns()):
        if match := re.fullmatch(r"FSDP::all_gather(?: \((.+)\))?", event.name()):
            into.append(frozenset(match[1].split(", ")) if match[1] else ROOT)


def declared(job: Job, tied: bool) -> list[Group]:
    """Return the groups in the order in which a step's first micro-batch gathers them."""
    plan = schedule(job, tied)
    policy = job.config.parallelism.fsdp_reshard_after_forward
    forward_order, order = range(len(plan.groups)), list[int]()
    not_resharded = {"default": {plan.last}, "never": set(forward_order)}.get(str(policy), set[int]())
    one_ahead = {turn: (following,) for turn, following in pairwise(plan.backward_order)}  # FSDP2's own

    def gather(turns: Sequence[int], gathered: set[int], prefetched: Mapping[int, tuple[int, ...]]) -> None:
        for turn in turns:
            for group in (turn, *prefetched.get(turn, ())):
                if group not in gathered:
                    gathered.add(group)
                    order.append(group)

    gather(forward_order, set(), dict(enumerate(plan.forward or ())))
    gather(plan.backward_order, not_resharded, dict(enumerate(plan.backward)) if plan.backward else one_ahead)
    groups = [frozenset(group) for group in plan.groups]
    if plan.last_is_root:
        groups[plan.last] = ROOT
    return [groups[group] for group in order]


def first_difference(actual: list[Group], expected: list[Group]) -> str:
    """Describe the first group gathered out of order, or return an empty string; more micro-batches may follow."""
    for number, group in enumerate(expected):
        gathered = actual[number] if number < len(actual) else frozenset(("nothing",))
        if gathered != group:
            return f"{_name(gathered)} was gathered instead of {_name(group)}, at position {number + 1}"
    return ""


def _name(group: Group) -> str:
    return "+".join(sorted(group))
