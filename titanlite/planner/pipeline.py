"""Plan a pipeline rank's step of many micro-batches from a step of few.

Exact, as tests confirm by rehearsing whole steps: what a rank does between two events is the same
for all micro-batches except at the first and the last event of a kind on a stage, and the same for
ranks whose stages have the same number of blocks. Only the order of the events differs, and torch's
schedules give it without computing."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import groupby
from operator import add, sub
from typing import Any

from titanlite.config.job import Job
from titanlite.config.stages import Stages
from titanlite.parallel.pipeline_parallel import build_schedule
from titanlite.planner.record import Event, Operation, Recording
from titanlite.planner.torch_private import SilentStage, run_silently


def shortened_job(job: Job) -> Job:
    """Return a pipeline's job with the fewest micro-batches that still have every kind of event:
    the first, the last, and one in between.
    """
    stages = job.stages
    reshard = job.config.parallelism.fsdp_reshard_after_forward
    if (
        job.layout.pp == 1
        or len(stages.ranks[0]) > 3  # torch's schedules gather three stages ahead
        or reshard not in ("default", "never")  # forward passes gather, except after a backward one
    ):
        return job
    return replace(job, stages=_shortened(stages))


@cache
def _shortened(stages: Stages) -> Stages:
    for count in range(3, stages.micro_batches):
        few = replace(stages, micro_batches=count)
        try:
            if all(_has_all_kinds(few, stages, rank) for rank in range(len(stages.ranks))):
                return few
        except ValueError:
            continue  # torch's schedule does not run this number
    return stages


def _has_all_kinds(few: Stages, stages: Stages, rank: int) -> bool:
    """Return whether a rank has every kind of event with few micro-batches that it has with all."""
    return {*_kinds(_events(stages, rank))} <= {*_kinds(_events(few, rank))}


def rank_kind(job: Job, rank: int) -> Any:
    """Return a key that ranks share if they differ only in their blocks' numbers and in the order
    of their events.
    """
    stages = []
    for stage in job.stages.ranks[rank]:
        blocks = blocks_of(job, stage)
        stages.append((len(blocks), frozenset(job.stages.names[stage]) - {*blocks}))
    return (*stages, frozenset(_kinds(_events(job.stages, rank))))


def blocks_of(job: Job, stage: int) -> list[str]:
    return [n for n in job.stages.names[stage] if n.startswith(f"{job.spec.blocks}.")]


def all_micro_batches(few: Recording, job: Job, rank: int) -> Recording:
    """Return a rank's whole step, derived from the shortened step of an equivalent rank."""
    start, *parts = ([*part] for _, part in groupby(few.operations, lambda one: one.event))
    taken = [part[0].event or Event("rest") for part in parts]
    afterwards = [*parts[1:], parts[-1]]
    known = dict(zip(_kinds(taken), zip(taken, parts, afterwards, strict=True), strict=True))
    events = [*_events(job.stages, rank), Event("rest")]
    firsts = [*zip(_first_blocks(job, taken), _first_blocks(job, events), strict=True)]
    operations = [_renamed(one, firsts) for one in start]
    alive = parts[0][0].by_kind
    for event, kind in zip(events, _kinds(events), strict=True):
        _, part, (after, *_) = known[kind]
        growth = tuple(map(sub, alive, part[0].by_kind))
        operations += [_moved(_renamed(one, firsts), event, growth) for one in part]
        alive = tuple(map(add, after.by_kind, growth))
    return replace(few, operations=operations)


def _renamed(one: Operation, firsts: Sequence[tuple[int, int]]) -> Operation:
    """Return an operation with this rank's block number instead of the recorded rank's; `firsts`
    are the first blocks of the stages of both, in order.

    A rank gathers a stage during the event of another one, or before any.
    """
    name, _, number = one.phase.rpartition(" ")
    if not number.isdigit():
        return one
    its, own = max(pair for pair in firsts if pair[0] <= int(number))
    return replace(one, phase=f"{name} {int(number) - its + own}")


def _moved(one: Operation, event: Event, growth: tuple[int, ...]) -> Operation:
    """Return an operation moved to another event, with the bytes alive there."""
    by_kind = tuple(map(add, one.by_kind, growth))
    return replace(one, live=sum(by_kind[:-1]), by_kind=by_kind, event=event)


def _first_blocks(job: Job, events: Sequence[Event]) -> list[int]:
    """Return the first block of each stage of these events that has blocks."""
    stages = sorted({each.stage for each in events if each.stage >= 0})  # the rest has none
    blocks = [blocks_of(job, stage) for stage in stages]
    return [int(names[0].rpartition(".")[2]) for names in blocks if names]


def _kinds(events: Sequence[Event]) -> Iterator[tuple[int, str, str, bool, bool]]:
    """Yield for each event the place of its stage on the rank, its kind, for a send the kind of the
    stage's last action, and whether a later and whether an earlier event is like it.
    """
    stages = sorted({event.stage for event in events})
    left = Counter((event.stage, event.kind) for event in events)
    whole = left.copy()
    acted = dict[int, str]()
    for event in events:
        key = event.stage, event.kind
        left[key] -= 1
        if event.kind in ("F", "B", "I", "W"):
            acted[event.stage] = event.kind
        sent = ""
        if event.kind.startswith("send"):
            sent = acted[event.stage]
        yield stages.index(event.stage), event.kind, sent, left[key] > 0, left[key] + 1 < whole[key]


def _events(stages: Stages, rank: int) -> list[Event]:
    """Return the events of a rank's step in order, without the rest after the schedule."""
    own = stages.ranks[rank]
    events = list[Event]()
    silent = [SilentStage(stage, stages.rank_of, events) for stage in own]
    run_silently(build_schedule(silent, stages), events)
    return events
