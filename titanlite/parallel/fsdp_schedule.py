"""The FSDP prefetch schedule: which group all-gathers which others ahead of their turn. Data first, then applied.

Groups are numbered in the order in which the forward pass needs them. A depth of 0 leaves FSDP2's own order: in the
forward pass each group is gathered when it is reached, in the backward pass one ahead. No torch in here, so that
`titanlite config --schedule` can print it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from titanlite.config.job import Job


@dataclass(frozen=True)
class Schedule:
    """For each group, the groups that it gathers ahead; None leaves FSDP2's own order."""

    groups: tuple[str, ...]
    turns: tuple[int, ...]
    """The groups in the order in which the backward pass needs them."""
    forward: tuple[tuple[int, ...], ...] | None
    backward: tuple[tuple[int, ...], ...] | None

    def __str__(self) -> str:
        lines = []
        for name, ahead, order in (
            ("forward", self.forward, range(len(self.groups))),
            ("backward", self.backward, self.turns),
        ):
            if ahead is None:
                lines.append(f"{name}: FSDP2's own order ({'none' if name == 'forward' else 'one'} ahead)")
                continue
            lines.append(f"{name}:")
            for group in order:
                others = ", ".join(self.groups[other] for other in ahead[group]) or "nothing"
                lines.append(f"  {self.groups[group]} gathers {others}")
        return "\n".join(lines)


def group_names(job: Job, tied: bool) -> tuple[tuple[str, ...], ...]:
    """Modules that are gathered together, in the order in which the forward pass first needs them.

    A tied embedding and output are one group, needed first: two would each hold a shard of the same weight. A loss in
    chunks calls the output more than once a pass, which only the root's group, gathered first, outlives.
    """
    size = job.config.parallelism.fsdp_blocks_per_group
    blocks = [f"{job.spec.blocks}.{number}" for number in range(job.shape.layers)]
    grouped = [tuple(blocks[i : i + size]) for i in range(0, len(blocks), size)]
    if tied:
        return (*[(*job.spec.before, *job.spec.after)], *grouped)
    if head_in_root(job):
        return (job.spec.after, job.spec.before, *grouped)
    return (job.spec.before, *grouped, job.spec.after)


def head_in_root(job: Job) -> bool:
    """Whether the group with the output is the root's own."""
    return job.config.training.loss_chunks > 1


def group_with_output(job: Job, tied: bool) -> int:
    """The number of the group that is in use when the forward pass ends."""
    return 0 if tied or head_in_root(job) else len(group_names(job, tied)) - 1


def schedule(job: Job, tied: bool) -> Schedule:
    """The schedule that a job asks for."""
    groups = group_names(job, tied)
    count, first = len(groups), group_with_output(job, tied)
    turns = (first, *(group for group in reversed(range(count)) if group != first))
    ahead, behind = job.config.parallelism.fsdp_forward_prefetch, job.config.parallelism.fsdp_backward_prefetch
    forward = tuple(tuple(range(i + 1, min(i + 1 + ahead, count))) for i in range(count))
    after = {group: turns[place + 1 : place + 1 + behind] for place, group in enumerate(turns)}
    backward = tuple(after[group] for group in range(count))
    names = tuple("+".join(group) for group in groups)
    return Schedule(names, turns, forward if ahead else None, backward if behind else None)


def apply(groups: Sequence[Any], plan: Schedule) -> None:
    """Tell FSDP2; `groups` are the first modules of each group, sharded already."""
    for i, module in enumerate(groups):
        if plan.forward is not None:
            module.set_modules_to_forward_prefetch([groups[other] for other in plan.forward[i]])
        if plan.backward is not None:
            module.set_modules_to_backward_prefetch([groups[other] for other in plan.backward[i]])
