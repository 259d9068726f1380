"""Plan a deep model from rehearsals of shallow ones.

Identical blocks do identical work, so what a step sends and computes is affine in their number, and
so is the peak memory of each part of a step. Two rehearsals, one of a few blocks and one of a
period more, give any depth. Recomputation of every n-th block and FSDP's groups have a period of
several blocks; prefetches end some blocks before the last one. Rehearsed at full depth are: flavors
without n_layers, blocks of different shapes, patterns that name a block, optimizers that take
parameters one by one or in runs of equal size, and pipelines that split the backward pass."""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import lcm
from typing import Any

from titanlite.config.job import Job
from titanlite.config.stages import SPLIT_BACKWARD
from titanlite.parallel.build import build_model
from titanlite.planner.fake_world import FakeWorld
from titanlite.planner.pipeline import all_micro_batches, blocks_of, rank_kind, shortened_job
from titanlite.planner.record import Recording, Totals, add_up
from titanlite.planner.rehearse import rehearse


def fullest(ranks: Sequence[Totals]) -> Totals:
    return max(ranks, key=lambda totals: totals.peak)


def plan_ranks(job: Job, as_on_cuda: bool = True, imbalance: float = 1) -> list[Totals]:
    """Return the totals of a step for each pipeline rank, taken from the first of its ranks, which
    has the largest shards.
    """
    with FakeWorld() as world:
        return ranks_in(world, job, as_on_cuda, imbalance)


def ranks_in(
    world: FakeWorld, job: Job, as_on_cuda: bool = True, imbalance: float = 1, limit: int = 0
) -> list[Totals]:
    """Like plan_ranks, but in a world whose meshes and graphs other jobs share; with a limit in
    bytes, stop after the first pipeline rank that needs more.
    """
    step = partial(rehearse, world=world, as_on_cuda=as_on_cuda, imbalance=imbalance)
    is_short = as_on_cuda and shortened_job(job) != job
    ranks = list[Totals]()
    known = dict[Any, list[Recording]]()

    def all_batches(recording: Recording, one: Job, number: int) -> Recording:
        if is_short:
            return all_micro_batches(recording, one, number)
        return _repeat_middle(recording, one)

    for number in range(job.layout.pp):
        rank = number * (job.layout.world // job.layout.pp)
        shallow, steps = _shallow_jobs(job, number)
        kind = number
        if is_short:
            kind = rank_kind(job, number)
        if kind not in known:  # one after the other: they share caches
            known[kind] = [step(one, rank=rank) for one in shallow]
        pairs = zip(known[kind], shallow, strict=True)
        taken = [all_batches(recording, one, number) for recording, one in pairs]
        found = _extended(taken, shallow, steps, job, number) if steps else add_up(taken[0])
        ranks.append(found or add_up(all_batches(step(job, rank=rank), job, number)))
        if limit and ranks[-1].peak > limit:
            break
    return ranks


def _extended(
    taken: Sequence[Recording], shallow: Sequence[Job], steps: int, job: Job, rank: int
) -> Totals | None:
    """Return the totals of a rank's step, extrapolated from recordings of a few blocks and of a
    period more; None if their parts differ.
    """
    few = add_up(taken[0], _block_positions(shallow[0], shallow[0], job, rank))
    more = add_up(taken[1], _block_positions(shallow[1], shallow[0], job, rank))
    if few.moments.keys() == more.moments.keys():
        return few.extended(more, steps)
    return None


def _block_positions(one: Job, few: Job, job: Job, rank: int) -> dict[int, tuple[Any, int] | None]:
    """Return each block's position on a rank, counted from the start or the end of its stage, with
    its number in the whole job; None for middle blocks, which a job of few blocks lacks.
    """
    positions = dict[int, tuple[Any, int] | None]()
    for stage in job.stages.ranks[rank]:
        numbers, least, whole = (_block_numbers(each, stage) for each in (one, few, job))
        half = len(least) // 2
        for position, number in enumerate(numbers):
            from_end = position - len(numbers)
            positions[number] = None
            if position < half:
                positions[number] = (stage, position), whole[position]
            elif -from_end <= len(least) - half:
                positions[number] = (stage, from_end), whole[from_end]
    return positions


def _block_numbers(job: Job, stage: int) -> list[int]:
    """Return the numbers of a stage's blocks."""
    if job.layout.pp == 1:
        return [*range(job.shape.layers)]
    return [int(name.rpartition(".")[2]) for name in blocks_of(job, stage)]


def _shallow_jobs(job: Job, number: int) -> tuple[list[Job], int]:
    """Return a pipeline rank's job with a few blocks and with a period more, and the number of
    periods that the first lacks; only the job itself if it must be rehearsed at full depth.
    """
    period = _period(job)
    layers = job.shape.layers
    own = job.stages.ranks[number]
    if job.layout.pp > 1:
        layers = min(len(blocks_of(job, stage)) for stage in own)
    # A middle block's memory grows or falls with its number, so that one is kept at either end.
    steps = (layers - 2 * _edge(job) - 2 * period) // period
    in_config = getattr(job.model_config, "n_layers", 0)
    if steps < 2 or in_config != job.shape.layers or not _is_affine(job):
        return [job], 0
    return [_shallower(job, own, each * period) for each in (steps, steps - 1)], steps


def _shallower(job: Job, own: Sequence[int], less: int) -> Job:
    """Return a job with `less` blocks fewer in each stage of a pipeline rank."""
    if job.layout.pp == 1:
        flavor = replace(job.model_config, n_layers=job.shape.layers - less)
        return replace(job, model_config=flavor, shape=job.spec.shape(flavor))
    names = [*job.stages.names]
    for stage in own:
        left_out = blocks_of(job, stage)[-less:]
        names[stage] = tuple(name for name in names[stage] if name not in left_out)
    return replace(job, stages=replace(job.stages, names=tuple(names)))


def _period(job: Job) -> int:
    """Return the number of blocks after which the techniques repeat."""
    settings = job.config.activation_checkpoint
    every = 1
    if settings.mode == "selective" and settings.selective_ac_option.isdigit():
        every = int(settings.selective_ac_option)
    return lcm(job.config.parallelism.fsdp_blocks_per_group, every)


def _edge(job: Job) -> int:
    """Return how many of the first and of the last blocks differ from the others, since prefetches
    begin and end there.
    """
    settings = job.config.parallelism
    return _period(job) * max(1, settings.fsdp_forward_prefetch, settings.fsdp_backward_prefetch)


def _is_affine(job: Job) -> bool:
    """Return whether all blocks are identical and the optimizer treats all parameters alike."""
    config = job.config
    patterns = [
        *config.model.freeze,
        *config.parallelism.fsdp_keep_whole,
        *config.optimizer.no_decay,
    ]
    if any(re.search(r"[\d?\[]", pattern) for pattern in patterns):
        return False
    if job.stages.schedule in SPLIT_BACKWARD:  # a backward pass of weights names no block
        return False
    settings = config.optimizer
    in_runs = settings.state_dtype == "bfloat16" or settings.name not in ("AdamW", "Adam", "SGD")
    if in_runs or settings.implementation == "for-loop":
        return False
    model, _ = build_model(job)
    shapes = set()
    for block in model.get_submodule(job.spec.blocks).children():
        shapes.add(tuple((name, weight.shape) for name, weight in block.named_parameters()))
    return len(shapes) == 1


def _repeat_middle(recording: Recording, job: Job) -> Recording:
    """Return a recording of at most three micro-batches extended to all of them, by repeating the
    second.
    """
    times = job.batch.accumulation - 3
    if times <= 0 or job.layout.pp > 1:
        return recording
    phases = [operation.phase for operation in recording.operations]
    starts = []
    for i, phase in enumerate(phases):
        if phase == "embedding" != phases[i - 1]:
            starts.append(i)
    before = recording.operations[: starts[1]]
    middle = recording.operations[starts[1] : starts[2]]
    repeated = [*middle] * (times + 1)
    operations = [*before, *repeated, *recording.operations[starts[2] :]]
    return replace(recording, operations=operations)
