"""The order of FSDP's all-gathers and reductions by group: declared by a job, and recorded from FSDP2.

FSDP2 names the group of each in profiler traces (tried on torch 2.11, 2.13 and 2.15); the collectives' own arguments
don't distinguish blocks.
"""

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise, zip_longest

from torch import nn
from torch.profiler import ProfilerActivity, profile

from titanlite.config.job import Job
from titanlite.parallel.build import shared_names
from titanlite.parallel.fsdp_schedule import Schedule, schedule
from titanlite.registry import expert_paths

Group = frozenset[str]
ROOT = frozenset(("the root",))
"""FSDP2 gives the root's group no name."""


@contextmanager
def recorded(gathered: list[Group], reduced: list[Group]) -> Iterator[None]:
    """Append the modules of each all-gather and of each reduction, in the order of their issue."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*clears events")  # torch 2.11 warns of longer profiles
        trace = profile(activities=[ProfilerActivity.CPU])
        trace.start()
    try:
        yield
    finally:
        trace.stop()
    assert trace.profiler and trace.profiler.kineto_results
    # The public trace.events() makes an object for each of many thousand events: longer than the row's steps.
    events = [event for event in trace.profiler.kineto_results.events() if event.name().startswith("FSDP::")]
    for event in sorted(events, key=lambda event: event.start_ns()):
        if match := re.fullmatch(r"FSDP::(all_gather|post_backward_reduce)(?: \((.+)\))?", event.name()):
            into = gathered if match[1] == "all_gather" else reduced
            into.append(frozenset(match[2].split(", ")) if match[2] else ROOT)


def declared_gathers(job: Job, part: nn.Module, passes: Iterable[str]) -> list[Group]:
    """Return the groups in the order of a part's gathers in these passes, such as "FB".

    Groups of one rank have nothing to gather.
    """
    plan = _plan(job, part)
    policy = str(job.config.parallelism.fsdp_reshard_after_forward)
    forward_order, order = range(len(plan.groups)), list[int]()
    policy = "never" if policy == "default" and job.layout.pp > 1 else policy
    not_resharded = {"default": {plan.last}, "never": set(forward_order)}.get(policy, set[int]())
    one_ahead = {turn: (following,) for turn, following in pairwise(plan.backward_order)}  # FSDP2's own

    def gather(turns: Sequence[int], prefetched: Mapping[int, tuple[int, ...]]) -> None:
        for turn in turns:
            for group in (turn, *prefetched.get(turn, ())):
                if group not in whole:
                    whole.add(group)
                    order.append(group)

    whole = set[int]()
    for kind in passes:
        if kind == "F":
            gather(forward_order, dict(enumerate(plan.forward or ())))
            whole &= not_resharded
        else:  # which frees parameters only at the end of the step
            gather(plan.backward_order, dict(enumerate(plan.backward)) if plan.backward else one_ahead)
    groups, layout, spec = _groups(plan), job.layout, job.spec
    apart = tuple(
        f".{path}" for path in expert_paths(spec.rules(job.model), spec.blocks) if layout.experts_on_own_mesh
    )
    ranks = [layout.expert_fsdp if modules[0].endswith(apart) else layout.fsdp for modules in plan.groups]
    return [groups[group] for group in order if ranks[group] > 1]


def declared_reductions(job: Job, part: nn.Module) -> list[Group]:
    """Return the groups of a part that have gradients."""
    plan = _plan(job, part)

    def is_trained(modules: Iterable[str]) -> bool:
        return any(p.requires_grad for name in modules for p in part.get_submodule(name).parameters())

    return [group for group, modules in zip(_groups(plan), plan.groups, strict=True) if is_trained(modules)]


def _plan(job: Job, part: nn.Module) -> Schedule:
    return schedule(job, tied=bool(shared_names(part)), modules={name for name, _ in part.named_modules()})


def _groups(plan: Schedule) -> list[Group]:
    groups = [frozenset(group) for group in plan.groups]
    if plan.last_is_root:
        groups[plan.last] = ROOT
    return groups


def first_difference(actual: Sequence[Group | str], expected: Sequence[Group | str], done: str = "gathered") -> str:
    """Describe the first group, or action, that is not as expected, or return an empty string."""
    for number, (one, other) in enumerate(zip_longest(actual, expected, fillvalue="nothing"), 1):
        if one != other:
            return f"{_name(one)} was {done} instead of {_name(other)}, at position {number}"
    return ""


def _name(group: Group | str) -> str:
    return group if isinstance(group, str) else "+".join(sorted(group))
