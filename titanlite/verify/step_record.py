"""Compare a rank's step with its job's declarations: all-gathers, reductions, a pipeline's actions
and sends.

The rows of the table find wrong numbers; this finds work that is done too often, or in another
order. FSDP2 names the group of each gather and reduction in profiler traces (tried on torch 2.11,
2.13 and 2.15); the arguments of collectives don't distinguish blocks."""

import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise, zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from titanlite.config.job import Job
from titanlite.config.pipeline_order import parse
from titanlite.config.stages import SINGLE
from titanlite.parallel.build import shared_names
from titanlite.parallel.dtensor import local_part
from titanlite.parallel.fsdp_schedule import PrefetchSchedule, schedule
from titanlite.parallel.pipeline_parallel import Pipeline, orders
from titanlite.planner.torch_private import replaced
from titanlite.registry import expert_paths
from titanlite.train.forward import ModelRunner

Send = tuple[int, tuple[int, ...], torch.dtype]
"""The receiver's rank, a shape and a type."""


class StepRecorder:
    """Records a step of a job on a rank of its pipeline.

    Not the first step: FSDP2 learns the names of modules in their first forward pass, before which
    some schedules gather, and a pipeline tries its connections."""

    def __init__(self, job: Job, stage_rank: int) -> None:
        self.job = job
        self.stage_rank = stage_rank
        self.sharded = job.layout.max_shard_degree > 1
        self.gathered: list[Group] = []
        self.reduced: list[Group] = []
        self.sent: Counter[Send] = Counter()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what runs inside."""
        send = dist.ProcessGroup.send

        def send_and_count(
            group: dist.ProcessGroup, tensors: list[torch.Tensor], receiver: int, tag: int
        ) -> Any:
            for tensor in tensors:
                if tensor.is_floating_point():  # torch's first step tries connections with integers
                    rank = dist.get_global_rank(group, receiver)
                    self.sent[rank, tuple(tensor.shape), tensor.dtype] += 1
            return send(group, tensors, receiver, tag)

        recorder = recorded(self.gathered, self.reduced) if self.sharded else nullcontext()
        with replaced(dist.ProcessGroup, "send", send_and_count), recorder:
            yield

    def differences(
        self, parts: Sequence[nn.Module], model: ModelRunner
    ) -> Iterator[tuple[str, str]]:
        """Yield for each kind of record the first that is not as declared, or an empty string."""
        if isinstance(model, Pipeline):
            yield from self._pipeline_differences(parts, model)
        elif self.sharded:
            passes = "FB" * self.job.batch.accumulation
            gathers = declared_gathers(self.job, parts[0], passes)
            yield "all-gathers:", first_difference(self.gathered, gathers)

    def _pipeline_differences(
        self, parts: Sequence[nn.Module], pipeline: Pipeline
    ) -> Iterator[tuple[str, str]]:
        job = self.job
        actions = []
        for cell in orders(job.stages)[self.stage_rank]:
            actions.extend(parse(cell))
        declared = [f"{action.stage}{action.kind}{action.micro_batch}" for action in actions]
        yield "actions:", first_difference(pipeline.actions, declared, "done")
        yield "sends:", self._sends_difference(pipeline)
        if not self.sharded:
            return
        gathered = self.gathered
        if job.stages.schedule in SINGLE:
            gathers = declared_gathers(job, parts[0], [action.kind for action in actions])
        else:  # torch gathers all of a stage, in an unspecified order
            gathered = sorted(gathered, key=sorted)
            gathers = []
            for part in parts:
                gathers += declared_gathers(job, part, "F")
            gathers.sort(key=sorted)
        yield "all-gathers:", first_difference(gathered, gathers)
        reductions = []
        for part in parts:
            reductions += declared_reductions(job, part)
        reductions.sort(key=sorted)
        yield (
            "reductions:",
            first_difference(sorted(self.reduced, key=sorted), reductions, "reduced"),
        )

    def _sends_difference(self, pipeline: Pipeline) -> str:
        declared = self._declared_sends(pipeline)
        for kind in sorted(self.sent | declared, key=str):
            if self.sent[kind] != declared[kind]:
                receiver, shape, dtype = kind
                size = f"{' x '.join(map(str, shape))} of {str(dtype).removeprefix('torch.')}"
                return f"{self.sent[kind]} instead of {declared[kind]} of {size} to rank {receiver}"
        return ""

    def _declared_sends(self, pipeline: Pipeline) -> Counter[Send]:
        """Return the sends of a step: every stage sends its hidden states to the next one, and the
        gradients of its inputs back.

        Stages on the same rank, at the turn of a V, send each other nothing. Both ends of a tie
        send their gradient."""
        stages = self.job.stages
        layout = self.job.layout
        training = self.job.config.training
        rank_of = stages.rank_of
        shape = stages.size, training.seq_len // (layout.cp * layout.tp), pipeline.width
        sends = Counter[Send]()
        neighbors = []
        for stage in stages.ranks[self.stage_rank]:
            neighbors += [stage - 1, stage + 1]
        for neighbor in neighbors:
            receiver = rank_of.get(neighbor, self.stage_rank)
            if receiver != self.stage_rank:
                rank = dist.get_global_rank(pipeline.group, receiver)
                dtype = getattr(torch, training.mixed_precision_param)
                sends[rank, shape, dtype] += stages.micro_batches
        for parameter, receiver, _ in pipeline.tied:
            rank = dist.get_global_rank(pipeline.group, receiver)
            sends[rank, tuple(local_part(parameter).shape), parameter.dtype] += 1
        return sends


Group = frozenset[str]
ROOT = frozenset(("the root",))
"""The root's group, which FSDP2 does not name."""


@contextmanager
def recorded(gathered: list[Group], reduced: list[Group]) -> Iterator[None]:
    """Append the modules of each all-gather and each reduction, in the order they are issued."""
    with warnings.catch_warnings():
        # Until torch 2.14 is the minimum: 2.11 warns about longer profiles.
        warnings.filterwarnings("ignore", message=".*clears events")
        trace = profile(activities=[ProfilerActivity.CPU])
        trace.start()
    try:
        yield
    finally:
        trace.stop()
    assert trace.profiler and trace.profiler.kineto_results
    # The public trace.events() creates an object for each of many thousand events, which takes
    # longer than the row's steps.
    events = []
    for event in trace.profiler.kineto_results.events():
        if event.name().startswith("FSDP::"):
            events.append(event)
    for event in sorted(events, key=lambda event: event.start_ns()):
        match = re.fullmatch(r"FSDP::(all_gather|post_backward_reduce)(?: \((.+)\))?", event.name())
        if not match:
            continue
        group = ROOT
        if match[2]:
            group = frozenset(match[2].split(", "))
        if match[1] == "all_gather":
            gathered.append(group)
        else:
            reduced.append(group)


def declared_gathers(job: Job, part: nn.Module, passes: Iterable[str]) -> list[Group]:
    """Return the groups in the order of a part's gathers in these passes, such as "FB".

    Groups of one rank have nothing to gather.
    """
    plan = _plan(job, part)
    policy = str(job.config.parallelism.fsdp_reshard_after_forward)
    forward_order = range(len(plan.groups))
    order = list[int]()
    if policy == "default" and job.layout.pp > 1:
        policy = "never"
    not_resharded = {"default": {plan.last}, "never": set(forward_order)}.get(policy, set[int]())
    backward = {turn: (following,) for turn, following in pairwise(plan.backward_order)}  # FSDP2's
    if plan.backward:
        backward = dict(enumerate(plan.backward))

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
        else:
            gather(plan.backward_order, backward)
            if job.layout.pp == 1:  # a pipeline frees parameters only at the end of the step
                whole.clear()
    groups = _groups(plan)
    layout = job.layout
    spec = job.spec
    experts = expert_paths(spec.rules(job.model_config), spec.blocks)
    apart = tuple(f".{path}" for path in experts)
    ranks = []
    for modules in plan.groups:
        if layout.experts_on_own_mesh and modules[0].endswith(apart):
            ranks.append(layout.expert_fsdp)
        else:
            ranks.append(layout.fsdp)
    return [groups[group] for group in order if ranks[group] > 1]


def declared_reductions(job: Job, part: nn.Module) -> list[Group]:
    """Return the groups of a part that have gradients."""
    plan = _plan(job, part)

    def is_trained(module: str) -> bool:
        return any(weight.requires_grad for weight in part.get_submodule(module).parameters())

    found = []
    for group, modules in zip(_groups(plan), plan.groups, strict=True):
        if any(map(is_trained, modules)):
            found.append(group)
    return found


def _plan(job: Job, part: nn.Module) -> PrefetchSchedule:
    return schedule(
        job, tied=bool(shared_names(part)), modules={name for name, _ in part.named_modules()}
    )


def _groups(plan: PrefetchSchedule) -> list[Group]:
    groups = [frozenset(group) for group in plan.groups]
    if plan.last_is_root:
        groups[plan.last] = ROOT
    return groups


def first_difference(
    actual: Sequence[Group | str], expected: Sequence[Group | str], done: str = "gathered"
) -> str:
    """Describe the first group or action that is not as expected, or return an empty string."""
    for number, (one, other) in enumerate(zip_longest(actual, expected, fillvalue="nothing"), 1):
        if one != other:
            return f"{_name(one)} was {done} instead of {_name(other)}, at position {number}"
    return ""


def _name(group: Group | str) -> str:
    if isinstance(group, str):
        return group
    return "+".join(sorted(group))
