"""The FSDP prefetch schedule: which group all-gathers which others before their turn. Data first, then applied.

A depth of 0 leaves FSDP2's own order: in the forward pass each group is gathered when it is reached, in the backward
pass one ahead. No torch in here, so that `titanlite config --schedule` can print it.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from titanlite.config.job import Job
from titanlite.registry import expert_paths


@dataclass(frozen=True)
class Schedule:
    """Groups of modules that are gathered together, numbered as the forward pass needs them, and their prefetches."""

    groups: tuple[tuple[str, ...], ...]
    last: int
    """The group in use when the forward pass ends."""
    last_is_root: bool
    """That group is FSDP2's root group."""
    backward_order: tuple[int, ...]
    """The groups as the backward pass needs them."""
    forward: tuple[tuple[int, ...], ...] | None
    """For each group, the groups that it gathers ahead; None leaves FSDP2's own order."""
    backward: tuple[tuple[int, ...], ...] | None

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple("+".join(group) for group in self.groups)

    def __str__(self) -> str:
        lines, labels = [], self.labels
        for name, prefetch, order, ahead in (
            ("forward", self.forward, range(len(labels)), "none"),
            ("backward", self.backward, self.backward_order, "one"),
        ):
            if prefetch is None:
                lines.append(f"{name}: FSDP2's own order ({ahead} ahead)")
                continue
            lines.append(f"{name}:")
            for group in order:
                gathered = ", ".join(labels[other] for other in prefetch[group]) or "nothing"
                lines.append(f"  {labels[group]} gathers {gathered}")
        return "\n".join(lines)


def schedule(job: Job, tied: bool, modules: Collection[str] | None = None) -> Schedule:
    """Return the schedule of a model part that has these `modules` (None: the whole model).

    A tied embedding and output are one group, needed first: two would each hold a shard of the same weight. A loss in
    chunks calls the output more than once a pass; only the root group, gathered first, stays whole that long.
    Experts that are sharded over other ranks are groups of their own, needed after their block in both passes.
    """
    spec, settings = job.spec, job.config.parallelism

    def present(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(name for name in names if modules is None or name in modules)

    before, after = present(spec.before), present(spec.after)
    blocks = present(f"{spec.blocks}.{number}" for number in range(job.shape.layers))
    size = settings.fsdp_blocks_per_group
    block_groups = [blocks[i : i + size] for i in range(0, len(blocks), size)]
    paths = expert_paths(spec.rules(job.model), spec.blocks) if job.layout.experts_apart else ()
    with_experts = [f"{spec.blocks}.{number}" for number in range(job.shape.dense_layers, job.shape.layers)]
    head_in_root = job.config.training.loss_chunks > 1 and bool(after)
    if tied:
        groups = [(*before, *after), *block_groups]
    elif head_in_root:
        groups = [after, before, *block_groups]
    else:
        groups = [before, *block_groups, after]
    stacks = [
        [group, *((name,) for name in present(f"{b}.{path}" for b in group if b in with_experts for path in paths))]
        for group in groups
        if group
    ]
    groups, numbers = [group for stack in stacks for group in stack], count()
    numbered = [[next(numbers) for _ in stack] for stack in stacks]
    last = numbered[0 if tied or head_in_root else -1][0]
    backward = [number for stack in reversed(numbered) for number in (stack[0], *reversed(stack[1:]))]
    backward_order = (last, *(number for number in backward if number != last))
    ahead, backward_ahead = settings.fsdp_forward_prefetch, settings.fsdp_backward_prefetch
    order = range(len(groups))
    forward = tuple(tuple(order[i + 1 : i + 1 + ahead]) for i in order)
    turn = {group: number for number, group in enumerate(backward_order)}
    backward = tuple(backward_order[turn[i] + 1 : turn[i] + 1 + backward_ahead] for i in order)
    prefetches = forward if ahead else None, backward if backward_ahead else None
    return Schedule(tuple(groups), last, head_in_root, backward_order, *prefetches)


def set_prefetch(groups: Sequence[Any], plan: Schedule) -> None:
    """Hand the schedule to FSDP2; `groups` are the first modules of each group, sharded already."""
    for module, gathered in zip(groups, plan.forward or (), strict=False):
        module.set_modules_to_forward_prefetch([groups[other] for other in gathered])
    for module, gathered in zip(groups, plan.backward or (), strict=False):
        module.set_modules_to_backward_prefetch([groups[other] for other in gathered])
