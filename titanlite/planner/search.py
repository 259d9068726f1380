"""Look for the fastest plans of a config that fit, and for small changes that make one fit: by
rehearsals.

Never rehearsed are plans that the config's rules refuse, that what a rank keeps at least rules out,
that need more in some respect, and less in none, than a plan that did not fit, or that cannot be
faster than the best ones found. The possibly fastest come first."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf, prod
from operator import itemgetter
from typing import Any

from titanlite.config.job import Job, job_from
from titanlite.config.load import ConfigError, Loaded
from titanlite.config.schema import with_values
from titanlite.config.section import value_of
from titanlite.layout import divisors
from titanlite.observe.progress import track
from titanlite.planner.bounds import FLOAT8, Facts
from titanlite.planner.depth import fullest, ranks_in
from titanlite.planner.fake_world import FakeWorld
from titanlite.planner.hardware import Hardware
from titanlite.planner.record import Recording
from titanlite.planner.speed import Speed, speed_of_job

TP, REPLICATE = "parallelism.tensor_parallel_degree", "parallelism.data_parallel_replicate_degree"
SHARD, LOCAL = "parallelism.data_parallel_shard_degree", "training.local_batch_size"
CP, EP = "parallelism.context_parallel_degree", "parallelism.expert_parallel_degree"
PP, SCHEDULE = "parallelism.pipeline_parallel_degree", "parallelism.pipeline_parallel_schedule"
MICRO_BATCH = "parallelism.pipeline_parallel_microbatch_size"
GLOBAL, CHUNKS = "training.global_batch_size", "training.loss_chunks"
RECOMPUTE, RESHARD = "activation_checkpoint.mode", "parallelism.fsdp_reshard_after_forward"

RECOMPUTE_MODES = ("full", "selective", "none")
"""From the least memory to the most."""
MOST_SAMPLES, CHUNKED, MOST_PP, LEAST_TOKENS = 16, 8, 16, 4096
"""The largest local batch, the number of loss chunks, the most pipeline ranks that are tried, and
the fewest tokens of a sequence that a rank has under context parallel.
"""

Settings = Mapping[str, Any]
"""Values to lay over a config, by key."""


@dataclass(frozen=True)
class Candidate:
    """A plan that was rehearsed and fits."""

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
    """How many were "rehearsed", "ruled out" (by what they keep at least, by a plan that needs less
    and did not fit, or as slower than the best can be), and "not reached in time"."""
    needed: tuple[float, str] = (0, "")
    """The fewest bytes of a plan that did not fit, and what needs them."""


def search(job: Job, hardware: Hardware, max_seconds: float = 60, most: int = 10) -> Found:
    """Return the fastest plans for a job's model, global batch and number of ranks."""
    end, facts = time.monotonic() + max_seconds, Facts(job, hardware)
    fitting, too_large, legal = list[Candidate](), list[Job](), list[Any]()
    counts = dict.fromkeys(("rehearsed", "ruled out", "not reached in time"), 0)
    needed = inf, ""
    for settings in space(job, hardware):
        state = facts.state * settings[REPLICATE] / job.layout.world
        if state > hardware.usable_bytes:
            counts["ruled out"] += 1
            needed = min(needed, (state, "parameters, gradients and optimizer state alone"))
        elif other := changed(job, settings):
            legal.append(((facts.least_seconds(other), _demand(other)), settings, other))
    with FakeWorld() as world:
        ranked = sorted(legal, key=itemgetter(0))
        for (seconds, _), settings, other in track(ranked, len(ranked), "layouts"):
            size = facts.least_bytes(other)
            if size > hardware.usable_bytes:
                needed = min(needed, (size, "what a rank keeps at least"))
            slowest = fitting[most - 1].speed.estimate if len(fitting) >= most else inf
            if (
                max(size / hardware.usable_bytes, seconds / slowest) > 1
                or any(_needs_no_less(other, large) for large in too_large)
                or any(_is_no_faster(other, one.job) for one in fitting)
            ):
                counts["ruled out"] += 1
                continue
            if counts["rehearsed"] and time.monotonic() > end:
                counts["not reached in time"] += 1
                continue
            for tried in (settings, {**settings, CHUNKS: CHUNKED}):
                counts["rehearsed"] += 1
                other = changed(job, tried) or other
                full, candidate = _rehearse(job, tried, other, hardware, world)
                if candidate or full.peak - full.at_peak["logits"] > hardware.usable_bytes:
                    break
            if candidate:
                fitting.append(candidate)
                fitting.sort(key=lambda one: (one.speed.estimate, one.peak))
            else:
                too_large.append(other)
                needed = min(needed, (full.peak, f"{other.layout}, rehearsed,"))
    return Found(fitting[:most], counts, needed)


def measured(found: Found, number: int, measure: Callable[[Settings], float]) -> Found:
    """Return `found` with its best few sorted by `measure`, the seconds of a step."""
    timed = [
        replace(candidate, measured=measure(candidate.settings))
        for candidate in found.best[:number]
    ]
    return replace(
        found, best=[*sorted(timed, key=lambda candidate: candidate.measured), *found.best[number:]]
    )


def changes(job: Job, hardware: Hardware, most: int = 3) -> list[Candidate]:
    """Return changes that make a job fit, the smaller ones first; if none does, the fewest further
    ranks that do.
    """
    facts, found = Facts(job, hardware), list[Candidate]()
    if job.layout.pp > 1:
        return found  # a rehearsal of each would take minutes
    with FakeWorld() as world:
        for settings, ranks in _changes(job, hardware):
            if len(found) == most or (found and ranks > job.layout.world):
                break
            other = changed(job, settings, ranks)
            if other and facts.least_bytes(other) <= hardware.usable_bytes:
                found += filter(None, [_rehearse(job, settings, other, hardware, world)[1]])
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
    job: Job, settings: Settings, other: Job, hardware: Hardware, world: FakeWorld
) -> tuple[Recording, Candidate | None]:
    """Return the fullest rank of a job with other settings, and the candidate if it fits."""
    ranks = ranks_in(world, other, limit=hardware.usable_bytes)
    full = fullest(ranks)
    if not hardware.fits(full.peak, full.at_peak["host"]):
        return full, None
    new = [
        f"--{key} {value}" for key, value in settings.items() if value_of(job.given, key) != value
    ]
    new += [f"--world {other.layout.world}"] * (other.layout.world != job.layout.world)
    option = " ".join(new) or "as it is"
    speed = speed_of_job(other, ranks, hardware)[0]
    return full, Candidate(settings, other, option, full.peak, speed)


def space(job: Job, hardware: Hardware) -> Iterator[Settings]:
    """Yield the settings of the whole search."""
    world, total, settings = job.layout.world, job.batch.total, job.config.parallelism
    degrees, seq_len = divisors(world), job.config.training.seq_len
    meshes: dict[str, Sequence[int]] = {
        PP: [n for n in degrees if n <= min(MOST_PP, job.shape.layers)],
        REPLICATE: degrees,
        CP: [n for n in degrees if n in (1, job.layout.cp) or n * LEAST_TOKENS <= seq_len],
        TP: [n for n in degrees if n <= hardware.node.gpus],
        EP: divisors(job.shape.experts or 1),
    }
    for values in product(*meshes.values()):
        shard, rest = divmod(world, prod(values[:4]))
        share, uneven = divmod(total, shard * values[1] or 1)
        if rest or uneven:
            continue
        mesh = {**dict(zip(meshes, values, strict=True)), SHARD: shard, GLOBAL: total, CHUNKS: 1}
        axes: dict[str, Sequence[Any]] = {
            LOCAL: [n for n in divisors(share) if n <= MOST_SAMPLES],
            RECOMPUTE: RECOMPUTE_MODES,
            RESHARD: ("always", "never") if shard > 1 else ("default",),
        }
        if value_of(job.given, FLOAT8):
            axes[FLOAT8] = (True, False)
        if mesh[PP] > 1:  # its step is one run of the schedule
            axes |= {LOCAL: [share], RESHARD: ["default"], MICRO_BATCH: (1, 2)}
            own = settings.pipeline_parallel_schedule
            axes[SCHEDULE] = sorted({own, "1F1B", "Interleaved1F1B"})
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
    samples = job.batch.local, job.stages.size
    return layout.dp_replicate, *samples, keeps, recompute, -config.training.loss_chunks


def _program(job: Job) -> Any:
    """Return what plans have in common whose demands can be compared."""
    mesh = replace(job.layout, dp_replicate=1, dp_shard=1)
    return mesh, job.stages.names, job.stages.schedule, value_of(job.config, FLOAT8)


def _needs_no_less(job: Job, other: Job) -> bool:
    both = zip(_demand(job), _demand(other), strict=True)
    return _program(job) == _program(other) and all(one >= another for one, another in both)


def _is_no_faster(job: Job, other: Job) -> bool:
    """Return whether a job recomputes no less than another, and is the same in all else."""
    return _demand(job)[:-2] == _demand(other)[:-2] and _needs_no_less(other, job)
