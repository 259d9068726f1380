"""The FSDP prefetch schedule: which group all-gathers which others ahead of time.

The schedule is computed as data, then applied. A depth of 0 leaves FSDP2's order: the forward pass
gathers each group when it reaches it, the backward pass one group ahead. This file does not import
torch, so that `titanlite config --schedule` prints the schedule quickly.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from titanlite.config.job import Job
from titanlite.registry import Rule, expert_paths


@dataclass(frozen=True)
class PrefetchSchedule:
    """Groups of modules that are gathered together, and their prefetches.

    Groups are numbered in the order in which the forward pass needs them.
    """

    groups: tuple[tuple[str, ...], ...]
    last: int
    """The group in use when the forward pass ends."""
    last_is_root: bool
    """That group is FSDP2's root group."""
    forward_only: frozenset[int]
    """The groups that only the forward pass needs: embeddings, whose gradient does not read them.
    """
    backward_order: tuple[int, ...]
    """The others, in the order in which the backward pass needs them."""
    forward: tuple[tuple[int, ...], ...] | None
    """For each group, the groups that it prefetches; None leaves FSDP2's order."""
    backward: tuple[tuple[int, ...], ...] | None

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple("+".join(group) for group in self.groups)

    def __str__(self) -> str:
        forward = self._lines("forward", self.forward, range(len(self.groups)), "none")
        backward = self._lines("backward", self.backward, self.backward_order, "one")
        return "\n".join(forward + backward)

    def _lines(
        self,
        name: str,
        prefetch: tuple[tuple[int, ...], ...] | None,
        order: Iterable[int],
        ahead: str,
    ) -> list[str]:
        """Describe one pass."""
        if prefetch is None:
            return [f"{name}: FSDP2's own order ({ahead} ahead)"]
        labels = self.labels
        lines = [f"{name}:"]
        for group in order:
            gathered = ", ".join(labels[other] for other in prefetch[group]) or "nothing"
            lines.append(f"  {labels[group]} gathers {gathered}")
        return lines


def schedule(job: Job, tied: bool, modules: Collection[str] | None = None) -> PrefetchSchedule:
    """Return the schedule of a model part that has these `modules` (None: the whole model).

    A tied embedding and output form one group, needed first; as two, each would hold a shard of the
    same weight. A chunked loss calls the output more than once a pass; only the root group, which
    is gathered first, stays whole that long.
    """
    spec = job.spec
    settings = job.config.parallelism

    def present(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(name for name in names if modules is None or name in modules)

    before = present(spec.before)
    after = present(spec.after)
    blocks = present(f"{spec.blocks}.{number}" for number in range(job.shape.layers))
    size = settings.fsdp_blocks_per_group
    groups = [blocks[i : i + size] for i in range(0, len(blocks), size)]
    head_in_root = job.config.training.loss_chunks > 1 and bool(after)
    if tied:
        groups = [(*before, *after), *groups]
    elif head_in_root:
        groups = [after, before, *groups]
    else:
        groups = [before, *groups, after]
    experts = _experts_apart(job)
    ordered: list[tuple[str, ...]] = []
    numbered: list[range] = []  # of each group and the groups of its experts
    for group in filter(None, groups):
        first = len(ordered)
        ordered.append(group)
        for block in group:
            ordered += [(name,) for name in present(experts.get(block, ()))]
        numbered.append(range(first, len(ordered)))
    last = numbered[-1][0]
    if tied or head_in_root:
        last = numbered[0][0]
    count = len(ordered)
    forward_only = _looked_up(ordered, spec.rules(job.model_config))
    backward_order = _backward_order(numbered, last, forward_only)
    return PrefetchSchedule(
        groups=tuple(ordered),
        last=last,
        last_is_root=head_in_root,
        forward_only=forward_only,
        backward_order=backward_order,
        forward=_next_groups(range(count), settings.fsdp_forward_prefetch, count),
        backward=_next_groups(backward_order, settings.fsdp_backward_prefetch, count),
    )


def _looked_up(groups: Iterable[Iterable[str]], rules: Iterable[Rule]) -> frozenset[int]:
    """Return the groups that have nothing but embeddings that are not also the output."""
    found = set()
    for number, group in enumerate(groups):
        inside = []
        for rule in rules:
            if any(rule.pattern.startswith(f"{name}.") for name in group):
                inside.append(rule.tensor == "embedding" and not rule.tied)
        if inside and all(inside):
            found.add(number)
    return frozenset(found)


def _experts_apart(job: Job) -> dict[str, list[str]]:
    """Return the experts of every block, if they form separate groups.

    They do if other ranks shard them. Both passes need them after their block.
    """
    if not job.layout.experts_on_own_mesh or experts_are_whole(job):
        return {}
    spec = job.spec
    paths = expert_paths(spec.rules(job.model_config), spec.blocks)
    experts = {}
    for number in range(job.shape.dense_layers, job.shape.layers):
        block = f"{spec.blocks}.{number}"
        experts[block] = [f"{block}.{path}" for path in paths]
    return experts


def experts_are_whole(job: Job) -> bool:
    """Return whether each expert is on one rank alone, with nothing to gather or to sum."""
    if job.config.training.enable_cpu_offload:
        return False
    return job.layout.experts_on_own_mesh and not job.layout.sums_experts_apart


def _backward_order(
    numbered: Sequence[Iterable[int]], last: int, forward_only: Collection[int]
) -> tuple[int, ...]:
    """Return the groups in the order in which the backward pass needs them: `last` first."""
    order = [last]
    for numbers in reversed(numbered):
        own, *experts = numbers
        if own != last:
            order.append(own)
        order += reversed(experts)
    return tuple(group for group in order if group not in forward_only)


def _next_groups(
    order: Sequence[int], depth: int, groups: int
) -> tuple[tuple[int, ...], ...] | None:
    """Return for each group the next `depth` groups in an order; None if the depth is 0."""
    if depth == 0:
        return None
    following: dict[int, tuple[int, ...]] = {}
    for turn, group in enumerate(order):
        following[group] = tuple(order[turn + 1 : turn + 1 + depth])
    return tuple(following.get(group, ()) for group in range(groups))


def set_prefetch(groups: Sequence[Any], plan: PrefetchSchedule) -> None:
    """Hand the schedule to FSDP2; `groups` are the first modules of each group, sharded already."""
    for group in plan.forward_only:
        groups[group].set_unshard_in_backward(False)
    for module, gathered in zip(groups, plan.forward or (), strict=False):
        module.set_modules_to_forward_prefetch([groups[other] for other in gathered])
    for module, gathered in zip(groups, plan.backward or (), strict=False):
        module.set_modules_to_backward_prefetch([groups[other] for other in gathered])
