"""Plan a step of a deep model from two rehearsals of a shallow one.

Exact, as tests compare with rehearsals of the whole: every count of an operation is affine in the
number of blocks and in the index of a block, except for the first and last blocks, which are
aligned from their end. The shallow models have as many blocks modulo `fsdp_blocks_per_group` and
the selective option. Other models are rehearsed whole: flavors without n_layers, blocks
of different shapes, patterns that name a block, optimizers that take parameters one by one or in
runs of equal size, pipelines that split the backward pass, and whatever does not pair off."""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby, zip_longest
from math import lcm
from typing import Any

import numpy as np

from titanlite.config.job import Job
from titanlite.config.stages import SPLIT_BACKWARD
from titanlite.parallel.build import build_model
from titanlite.planner.fake_world import FakeWorld
from titanlite.planner.pipeline import all_micro_batches, blocks_of, rank_kind, shortened
from titanlite.planner.record import Operation, Recording
from titanlite.planner.rehearse import rehearse

COSTS = slice(2, 5)
"""Columns of `_values` that are equal in all blocks: FLOPs, bytes that are moved and
communicated."""


def fullest(ranks: Sequence[Recording]) -> Recording:
    return max(ranks, key=lambda recording: recording.peak)


def plan_ranks(job: Job, as_on_cuda: bool = True, imbalance: float = 1) -> list[Recording]:
    """Return a step of each of a job's pipeline ranks: on the first of its ranks, which has the
    largest shards.
    """
    with FakeWorld() as world:
        return ranks_in(world, job, as_on_cuda, imbalance)


def ranks_in(
    world: FakeWorld, job: Job, as_on_cuda: bool = True, imbalance: float = 1, limit: int = 0
) -> list[Recording]:
    """Return the same in a world whose meshes and graphs other jobs share; with a limit of bytes,
    none after a pipeline rank that needs more.
    """
    step = partial(rehearse, world=world, as_on_cuda=as_on_cuda, imbalance=imbalance)
    is_short = as_on_cuda and shortened(job) != job
    ranks, known = list[Recording](), dict[Any, Recording]()
    for number in range(job.layout.pp):
        kind = rank_kind(job, number) if is_short else number
        if kind not in known:
            rank = number * (job.layout.world // job.layout.pp)
            shallow, steps = _shallow_jobs(job, number)
            # In turn: they share caches.
            taken = [step(one, rank=rank) for one in shallow]
            deep = steps and extrapolate(taken[0], taken[1], steps, _edge(job))
            known[kind] = deep or (step(job, rank=rank) if steps else taken[0])
        found = known[kind]
        ranks.append(
            all_micro_batches(found, job, number) if is_short else _repeat_middle(found, job)
        )
        if limit and ranks[-1].peak > limit:
            break
    return ranks


def _shallow_jobs(job: Job, number: int) -> tuple[list[Job], int]:
    """Return a pipeline rank's job with few blocks and with a period more, and how many periods
    the first lacks; only the job itself if it must be rehearsed whole.
    """
    period, layers = _period(job), job.shape.layers
    own = job.stages.ranks[number]
    if job.layout.pp > 1:
        layers = min(len(blocks_of(job, stage)) for stage in own)
    steps = (layers - 2 * _edge(job) - period) // period
    in_config = getattr(job.model_config, "n_layers", 0)
    if steps < 2 or in_config != job.shape.layers or not _is_affine(job):
        return [job], 0
    return [_shallower(job, own, each * period) for each in (steps, steps - 1)], steps


def _shallower(job: Job, own: Sequence[int], less: int) -> Job:
    """Return a job with so many blocks less, in each stage of a pipeline rank."""
    if job.layout.pp == 1:
        flavor = replace(job.model_config, n_layers=job.shape.layers - less)
        return replace(job, model_config=flavor, shape=job.spec.shape(flavor))
    names = [*job.stages.names]
    for stage in own:
        left_out = blocks_of(job, stage)[-less:]
        names[stage] = tuple(name for name in names[stage] if name not in left_out)
    return replace(job, stages=replace(job.stages, names=tuple(names)))


def _period(job: Job) -> int:
    """Return after how many blocks the techniques repeat."""
    settings = job.config.activation_checkpoint
    option = settings.selective_ac_option if settings.mode == "selective" else "1"
    return lcm(job.config.parallelism.fsdp_blocks_per_group, int(option) if option.isdigit() else 1)


def _edge(job: Job) -> int:
    """Return how many of the first and of the last blocks differ from those between: prefetches end
    there.
    """
    settings = job.config.parallelism
    return _period(job) * max(1, settings.fsdp_forward_prefetch, settings.fsdp_backward_prefetch)


def _is_affine(job: Job) -> bool:
    """Return whether all blocks are alike and the optimizer treats all parameters alike."""
    config = job.config
    patterns = [
        *config.model.freeze,
        *config.parallelism.fsdp_keep_whole,
        *config.optimizer.no_decay,
    ]
    if any(re.search(r"[\d?\[]", pattern) for pattern in patterns):
        return False
    if job.stages.schedule in SPLIT_BACKWARD:  # gradients of weights name no block
        return False
    settings = config.optimizer
    in_runs = settings.state_dtype == "bfloat16" or settings.name not in ("AdamW", "Adam", "SGD")
    if in_runs or settings.implementation == "for-loop":
        return False
    model, _ = build_model(job)
    blocks = model.get_submodule(job.spec.blocks).children()
    return len({tuple((n, p.shape) for n, p in block.named_parameters()) for block in blocks}) == 1


def extrapolate(few: Recording, more: Recording, steps: int, edge: int = 1) -> Recording | None:
    """Return the recording that is `steps` times as far from `few` as `more` is, which has a period
    of blocks more; None if they don't pair off.
    """
    operations: list[Operation] = []
    sections = ([[*group] for _, group in groupby(one.operations, _section)] for one in (few, more))
    for short, long in zip_longest(*sections, fillvalue=[]):
        stretched = short and long and _stretch(short, long, steps, edge)
        if not stretched:
            return None
        operations += stretched
    static = {kind: size + (more.static[kind] - size) * steps for kind, size in few.static.items()}
    return Recording(operations, static)


def _stretch(
    short: list[Operation], long: list[Operation], steps: int, edge: int
) -> list[Operation] | None:
    """Extrapolate a section: its operations pair off from the start and from the end, and those
    between repeat, at the same cost.
    """
    extra = len(long) - len(short)
    keys, expected = [*map(_key, short)], [*map(_key, long)]
    a, b = _values(short), _values(long)
    if not 0 <= extra <= len(short):
        return None
    for start in _starts(a, b, edge):
        end = start + extra
        if [*keys[:end], *keys[start:]] != expected:
            continue
        rows = slice(None) if extra and _number(short[0]) >= 0 else slice(start, end + extra)
        if (b[rows, COSTS] == np.concatenate([a[:end], a[start:]])[rows, COSTS]).all():
            break
    else:
        return None
    one, first, second = a[start:end], b[start:end], b[end : end + extra]
    values = [
        a[:start] + (b[:start] - a[:start]) * steps,
        *(one + (first - one) * steps + (second - first) * turn for turn in range(steps + 1)),
        a[end:] + (b[end + extra :] - a[end:]) * steps,
    ]
    like = [*short[:start], *short[start:end] * (steps + 1), *short[end:]]
    return [*map(_operation, like, np.concatenate(values).tolist())]


def _starts(short: np.ndarray, long: np.ndarray, edge: int) -> list[int]:
    """Return where the rows of a short section may begin to repeat: `edge` blocks inside; without
    blocks in the middle, or else before the first one of another cost.
    """
    numbers = short[:, 0].tolist()
    blocks = [*dict.fromkeys(numbers)]
    if len(blocks) == 1:
        most = 2 * len(short) - len(long)
        differ = [*(short != long[: len(short)])[:, COSTS].any(axis=1), True]
        return [most // 2, max(0, most - len(short) + differ.index(True))]
    if blocks[0] < blocks[-1]:
        return [numbers.index(blocks[edge])]
    # A group of fewer blocks than the others is the last: the backward pass begins with it.
    return [numbers.index(blocks[2 * len(blocks) - len({*long[:, 0]}) - edge])]


def _section(operation: Operation) -> Any:
    """Return a key that is equal for all blocks of a pass, and elsewhere for operations of a kind,
    as in a loop.
    """
    return _phase(operation) if _number(operation) >= 0 else _key(replace(operation, name=""))


def _phase(operation: Operation) -> str:
    return re.sub(r" \d+$", "", operation.phase)


def _number(operation: Operation) -> int:
    """Return the number of the block in an operation's phase; -1 if it has none."""
    return int(operation.phase.rpartition(" ")[2]) if operation.phase[-1].isdigit() else -1


def _key(operation: Operation) -> Any:
    """Return the key that operations of a pair share: the phase without its block, and the kind
    of operation.
    """
    collective = operation.collective and replace(operation.collective, bytes=0)
    return _phase(operation), operation.name, operation.dtype, collective, operation.is_fsdp


def _values(section: list[Operation]) -> np.ndarray:
    """Return a row of the extrapolated values for each operation."""
    rows = (
        (
            _number(o),
            o.live,
            o.flops,
            o.moved,
            o.collective.bytes if o.collective else 0,
            *o.by_kind,
        )
        for o in section
    )
    return np.array([*rows], dtype=np.int64)


def _operation(like: Operation, values: list[int]) -> Operation:
    """Return an operation with a row of values."""
    number, live, flops, moved, size, *by_kind = values
    phase = f"{_phase(like)} {number}" if number >= 0 else like.phase
    collective = like.collective and replace(like.collective, bytes=size)
    changed = replace(like, phase=phase, live=live, flops=flops, moved=moved)
    return replace(changed, collective=collective, by_kind=tuple(by_kind))


def _repeat_middle(recording: Recording, job: Job) -> Recording:
    """Return a recording of at most three micro-batches as one of all, with the second one
    repeated.
    """
    times = job.batch.accumulation - 3
    if times <= 0 or job.layout.pp > 1:
        return recording
    phases = [operation.phase for operation in recording.operations]
    starts = [i for i, phase in enumerate(phases) if phase == "embedding" != phases[i - 1]]
    before, middle = recording.operations[: starts[1]], recording.operations[starts[1] : starts[2]]
    operations = [*before, *[*middle] * (1 + times), *recording.operations[starts[2] :]]
    return replace(recording, operations=operations)
