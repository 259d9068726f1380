"""Look for the fastest plans of a config that fit, and for small changes that make one fit: by
rehearsals.

Never rehearsed are plans that the config's rules refuse, that parameters, gradients and optimizer
state alone rule out, that need more in some respect, and less in none, than a plan that did not
fit, or that cannot be faster than the best ones found. The possibly fastest come first."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch

from titanlite.config.job import Job, job_from
from titanlite.config.load import ConfigError, Loaded
from titanlite.config.schema import value_of, with_values
from titanlite.errors import UserError
from titanlite.layout import divisors
from titanlite.observe.throughput import flops_per_token
from titanlite.optim import optimizer_bytes, trained_parameters
from titanlite.parallel.build import build_model
from titanlite.planner.depth import fullest, plan_steps
from titanlite.planner.fake_world import FakeWorld
from titanlite.planner.hardware import Hardware
from titanlite.planner.record import Collective
from titanlite.planner.speed import Speed, is_compiled, speed_of_job, transfer

TP, REPLICATE = "parallelism.tensor_parallel_degree", "parallelism.data_parallel_replicate_degree"
SHARD, LOCAL = "parallelism.data_parallel_shard_degree", "training.local_batch_size"
GLOBAL, CHUNKS = "training.global_batch_size", "training.loss_chunks"
RECOMPUTE, RESHARD = "activation_checkpoint.mode", "parallelism.fsdp_reshard_after_forward"

RECOMPUTE_MODES = ("full", "selective", "none")
"""From the least memory to the most."""
MOST_SAMPLES, CHUNKED = 16, 8
"""The largest local batch and the number of loss chunks that are tried."""

Settings = Mapping[str, Any]
"""Values to lay over a config, by key."""


@dataclass(frozen=True)
class Candidate:
    """A plan that was rehearsed."""

    settings: Settings
    job: Job
    option: str
    """The settings for the command line: only what differs from the config, or another world."""
    peak: int
    speed: Speed
    measured: float = 0.0
    """Seconds of a step, where it was measured."""


@dataclass(frozen=True)
class Found:
    """What a search found, and how much of the space it saw."""

    best: Sequence[Candidate]
    """Those that fit, the fastest by estimate first."""
    counts: Mapping[str, int]
    """How many were "rehearsed", "ruled out" (by their state alone, by a plan that needs less and
    did not fit, or as slower than the best can be), and "not reached in time"."""


def search(job: Job, hardware: Hardware, max_seconds: float = 60, most: int = 10) -> Found:
    """Return the fastest plans for a job's model, global batch and number of ranks."""
    if job.layout.pp > 1:
        raise UserError("--search: pipelines are not searched yet, only planned as they are")
    end, facts = time.monotonic() + max_seconds, _Facts(job, hardware)
    # Each shares its rehearsed models.
    groups = defaultdict[Any, list[tuple[Settings, Job, float]]](list)
    for settings in _space(job, hardware):
        if other := changed(job, settings):
            shared = tuple(value for key, value in settings.items() if key not in (LOCAL, CHUNKS))
            groups[shared].append((settings, other, facts.least_seconds(other)))
    fitting, too_large = list[Candidate](), list[Job]()
    counts = dict.fromkeys(("rehearsed", "ruled out", "not reached in time"), 0)
    # What may be the fastest is first.
    ordered = sorted(
        groups.values(),
        key=lambda group: (min(least for *_, least in group), _demand(group[0][1])),
    )
    with FakeWorld() as world:
        for group in ordered:
            slowest = fitting[most - 1].speed.estimate if len(fitting) >= most else float("inf")
            tried = [
                (settings, other)
                for settings, other, least in group
                if least < slowest
                and facts.state_bytes(other) <= hardware.usable_bytes
                and not any(_needs_no_less(other, large) for large in too_large)
            ]
            counts["ruled out"] += len(group) - len(tried)
            if not tried or (counts["rehearsed"] and time.monotonic() > end):
                counts["not reached in time"] += len(tried)
                continue
            counts["rehearsed"] += len(tried)
            for candidate in _rehearse(job, tried, hardware, world):
                if candidate.peak <= hardware.usable_bytes:
                    fitting.append(candidate)
                else:
                    too_large.append(candidate.job)
            fitting.sort(key=lambda candidate: (candidate.speed.estimate, candidate.peak))
    return Found(fitting[:most], counts)


def measured(found: Found, number: int, measure: Callable[[Settings], float]) -> Found:
    """Return `found` with its best few sorted by `measure`, the seconds of a step."""
    timed = [
        replace(candidate, measured=measure(candidate.settings))
        for candidate in found.best[:number]
    ]
    return replace(
        found, best=[*sorted(timed, key=lambda candidate: candidate.measured), *found.best[number:]]
    )


def changes(job: Job, hardware: Hardware, most: int = 3, attempts: int = 12) -> list[Candidate]:
    """Return changes that make a job fit, the smaller ones first; more ranks only if nothing else
    does.
    """
    facts, found = _Facts(job, hardware), list[Candidate]()
    if job.layout.pp > 1:
        return found  # a rehearsal of each would take minutes
    with FakeWorld() as world:
        for settings, ranks in _changes(job, hardware):
            seen = {candidate.job.layout.world for candidate in found}
            if (
                len(found) == most
                or not attempts
                or (job.layout.world in seen and ranks > job.layout.world)
            ):
                break
            other = changed(job, settings, ranks)
            is_new = other != job and (ranks == job.layout.world or ranks not in seen)
            if other and is_new and facts.state_bytes(other) <= hardware.usable_bytes:
                attempts -= 1
                (candidate,) = _rehearse(job, [(settings, other)], hardware, world)
                if candidate.peak <= hardware.usable_bytes:
                    found.append(candidate)
    return found


def changed(job: Job, settings: Settings, world: int = 0) -> Job | None:
    """Return the job with other settings, or None if they break a rule of the config."""
    loaded = Loaded(with_values(job.given, settings), {}, set(), [])
    try:
        return job_from(
            loaded, world=world or job.layout.world, training=True, device=job.config.job.device
        )
    except ConfigError:
        return None


def _rehearse(
    job: Job, tried: Sequence[tuple[Settings, Job]], hardware: Hardware, world: FakeWorld
) -> list[Candidate]:
    """Rehearse jobs that differ from each other in nothing but batch and loss chunks."""
    found = []
    for (settings, other), ranks in zip(
        tried, plan_steps([other for _, other in tried], world), strict=True
    ):
        new = [
            f"--{key} {value}"
            for key, value in settings.items()
            if value_of(job.given, key) != value
        ]
        new += [f"--world {other.layout.world}"] * (other.layout.world != job.layout.world)
        option, peak = " ".join(new) or "as it is", fullest(ranks).peak
        speed = speed_of_job(other, ranks, hardware)[0]
        found.append(Candidate(settings, other, option, peak, speed))
    return found


def _space(job: Job, hardware: Hardware) -> Iterator[Settings]:
    """Yield the settings of the whole search."""
    world, total = job.layout.world, job.batch.total
    for tp, replicate in product(divisors(world), repeat=2):
        data_parallel, rest = divmod(world, tp * job.layout.cp)
        if rest or tp > hardware.node.gpus or data_parallel % replicate or total % data_parallel:
            continue
        mesh = {TP: tp, REPLICATE: replicate, SHARD: data_parallel // replicate, GLOBAL: total}
        axes: dict[str, Sequence[Any]] = {
            LOCAL: [local for local in divisors(total // data_parallel) if local <= MOST_SAMPLES],
            RECOMPUTE: RECOMPUTE_MODES,
            RESHARD: ("always", "never") if data_parallel > replicate else ("default",),
            CHUNKS: (1, CHUNKED),
        }
        yield from (
            mesh | dict(zip(axes, values, strict=True)) for values in product(*axes.values())
        )


def _changes(job: Job, hardware: Hardware) -> Iterator[tuple[Settings, int]]:
    """Yield changes that make a step smaller, with their ranks: each alone, all without more ranks,
    more ranks.
    """
    world, total = job.layout.world, job.batch.total
    cheap: list[dict[str, Any]] = [
        {CHUNKS: CHUNKED},
        {LOCAL: 1, GLOBAL: total},
        {RECOMPUTE: "full"},
    ]
    meshes = [{REPLICATE: 1, SHARD: -1}] if job.layout.dp_replicate > 1 else []
    degrees = [tp for tp in divisors(min(world, hardware.node.gpus)) if tp > job.layout.tp]
    meshes += [{TP: tp, SHARD: -1, GLOBAL: total} for tp in degrees]
    everything = {key: value for change in cheap for key, value in change.items()}
    for settings in (*cheap, everything, *meshes, *(everything | mesh for mesh in meshes)):
        yield settings, world
    for more in (world << doublings for doublings in range(1, 7)):
        yield {SHARD: -1}, more
        yield {SHARD: -1, CHUNKS: CHUNKED, RECOMPUTE: "full", LOCAL: 1}, more


def _demand(job: Job) -> tuple[int, ...]:
    """Return numbers; if one of them rises alone, the memory grows."""
    config, layout = job.config, job.layout
    recompute = RECOMPUTE_MODES.index(config.activation_checkpoint.mode)
    keeps = config.parallelism.fsdp_reshard_after_forward == "never"
    return layout.dp_replicate, job.batch.local, recompute, keeps, -config.training.loss_chunks


def _needs_no_less(job: Job, other: Job) -> bool:
    both = zip(_demand(job), _demand(other), strict=True)
    return job.layout.tp == other.layout.tp and all(one >= another for one, another in both)


class _Facts:
    """The facts about a job's model, on any mesh, without a rehearsal."""

    def __init__(self, job: Job, hardware: Hardware) -> None:
        self._hardware, self._layers = hardware, job.shape.layers
        model, table = build_model(job)
        trained = trained_parameters([model], table, job.spec.blocks, no_decay=())
        named = [*model.named_parameters()]
        state = sum(p.nbytes * (1 + p.requires_grad) for _, p in named)
        self._state = state + optimizer_bytes(trained, job.config)
        self._parameters = sum(p.numel() for _, p in named)
        self._trained = sum(item.parameter.numel() for item in trained)
        self._width = min(
            (p.size(1) for n, p in named if table[n].tensor == "embedding"), default=0
        )
        flops = partial(
            flops_per_token, table=table, shape=job.shape, seq_len=job.config.training.seq_len
        )
        self._flops = flops(named)
        self._recomputed = (
            flops(item for item in named if item[0].startswith(f"{job.spec.blocks}.")) // 3
        )
        """Of the blocks' forward pass."""

    def state_bytes(self, job: Job) -> int:
        """Return the bytes of parameters, gradients and optimizer state on a rank."""
        return self._state // job.layout.model_shards

    def least_seconds(self, job: Job) -> float:
        """Return a lower limit of a step's estimate: the longest of its lanes."""
        layout, hardware, batch = job.layout, self._hardware, job.batch
        training, settings = job.config.training, job.config.parallelism

        def seconds(kind: str, dimension: str, elements: int, dtype: str) -> float:
            size = elements * getattr(torch, dtype).itemsize
            return transfer(
                Collective(kind, dimension, getattr(layout, dimension), dtype, size),
                layout,
                hardware,
            )[0]

        dtype, reduced = training.mixed_precision_param, training.mixed_precision_reduce
        is_full = job.config.activation_checkpoint.mode == "full"
        samples = batch.local * batch.accumulation
        tokens = own_tokens = training.seq_len // layout.cp
        if layout.cp > 1:  # chunks attend to half of all pairs of tokens or more
            tokens //= 2
        flops = (self._flops + is_full * self._recomputed) * samples * tokens / layout.tp
        share = hardware.efficiencies[hardware.efficiency_of(dtype, is_compiled(job))].share
        computing = flops / hardware.peak(dtype) / share
        # Two gathers and two reductions in each pass of a block.
        activations = seconds("all-gather", "tp", own_tokens * self._width, dtype)
        computing += activations * (12 if is_full else 8) * self._layers * samples
        passes = 1 if settings.fsdp_reshard_after_forward == "never" else 2
        splits = layout.tp * layout.ep  # of each weight by one of them, so that this is a limit
        own = self._trained // splits
        gather = seconds("all-gather", "dp_shard", self._parameters // splits, dtype)
        scatter = seconds("reduce-scatter", "dp_shard", own, reduced)
        reduce = seconds("all-reduce", "dp_replicate", own // layout.dp_shard, reduced)
        reductions = 1 if settings.defer_gradient_sync else batch.accumulation
        gathers = batch.accumulation * passes * gather
        return max(computing, gathers + reductions * scatter, reductions * (scatter + reduce))
