"""Look for the fastest plans of a config that fit, and for small changes that make one fit: by rehearsals.

Never rehearsed is what the config's rules refuse, what parameters, gradients and optimizer state alone rule out, and
what needs more in some respect, and less in none, than a plan that did not fit. A guess of the speed only decides
what is rehearsed first, when the time does not suffice for all.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from titanlite.config.job import Job, job_from
from titanlite.config.load import ConfigError, Loaded
from titanlite.config.schema import KEYS, config_of, value_of
from titanlite.config.toml import toml_value
from titanlite.layout import divisors
from titanlite.optim import optimizer_bytes, trained_parameters
from titanlite.parallel.build import build_model
from titanlite.planner.depth import plan_step
from titanlite.planner.hardware import Hardware
from titanlite.planner.plan import is_upper_bound
from titanlite.planner.record import Collective
from titanlite.planner.speed import Speed, speed_of, traffic

TP, REPLICATE = "parallelism.tensor_parallel_degree", "parallelism.data_parallel_replicate_degree"
SHARD, LOCAL = "parallelism.data_parallel_shard_degree", "training.local_batch_size"
GLOBAL, CHUNKS = "training.global_batch_size", "training.loss_chunks"
RECOMPUTE, RESHARD = "activation_checkpoint.mode", "parallelism.fsdp_reshard_after_forward"
PREFETCH = "parallelism.fsdp_forward_prefetch"

RECOMPUTED = {"full": 4 / 3, "selective": 7 / 6, "none": 1.0}
"""Modes from the least memory to the most, with their FLOPs relative to none, for the guess."""
MOST_SAMPLES, CHUNKED = 16, 8
"""The largest local batch and the number of loss chunks that are tried."""

Settings = Mapping[str, Any]
"""Values to lay over a config, by key."""


@dataclass(frozen=True)
class Candidate:
    """A plan that was rehearsed."""

    settings: Settings
    option: str
    """The same for the command line: only what differs from the config, or another world."""
    peak: int
    speed: Speed
    measured: float = 0.0
    """Seconds of a step, where it was measured."""

    @property
    def bound(self) -> float:
        return self.speed.bound


@dataclass(frozen=True)
class Found:
    """What a search found, and how much of the space it saw."""

    best: Sequence[Candidate]
    """Those that fit, the fastest by estimate first."""
    rehearsed: int
    ruled_out: int
    not_reached: int
    """In the time that it had."""


def search(job: Job, hardware: Hardware, max_seconds: float = 60, most: int = 10) -> Found:
    """Return the fastest plans for a job's model, global batch and number of ranks."""
    end, state = time.monotonic() + max_seconds, _state_bytes(job)
    legal = [(settings, other) for settings in _space(job, hardware) if (other := changed(job, settings))]
    legal.sort(key=lambda pair: (pair[0][PREFETCH], _guess(pair[1], state, hardware), sum(_demand(pair[1]))))
    fitting, too_large = list[Candidate](), list[Job]()
    rehearsed = ruled_out = 0
    for settings, other in legal:
        too_much = state // other.layout.splits > hardware.usable_bytes
        if too_much or any(_needs_no_less(other, large) for large in too_large):
            ruled_out += 1
        elif not rehearsed or time.monotonic() < end:
            rehearsed += 1
            candidate = _rehearsed(job, other, settings, hardware)
            if candidate.peak <= hardware.usable_bytes:
                fitting.append(candidate)
            else:
                too_large.append(other)
    best = sorted(fitting, key=lambda candidate: (candidate.speed.estimate, candidate.peak))[:most]
    return Found(best, rehearsed, ruled_out, len(legal) - rehearsed - ruled_out)


def measured(found: Found, number: int, measure: Callable[[Settings], float]) -> Found:
    """Return what was found, with the best few sorted by `measure`, which returns the seconds of a step."""
    timed = [replace(candidate, measured=measure(candidate.settings)) for candidate in found.best[:number]]
    return replace(found, best=[*sorted(timed, key=lambda candidate: candidate.measured), *found.best[number:]])


def changes(job: Job, hardware: Hardware, most: int = 3, attempts: int = 12) -> list[Candidate]:
    """Return changes that make a job fit, the smaller ones first; more ranks only if nothing else does."""
    state, found = _state_bytes(job), list[Candidate]()
    for settings, world in _changes(job, hardware):
        other = changed(job, settings, world)
        if len(found) == most or not attempts or (found and world != job.layout.world):
            break
        if other and other != job and state // other.layout.splits <= hardware.usable_bytes:
            attempts -= 1
            candidate = _rehearsed(job, other, settings, hardware)
            found += [candidate] if candidate.peak <= hardware.usable_bytes else []
    return found


def overlay(settings: Settings) -> str:
    """Write settings as TOML to lay over a config."""
    sections = defaultdict(list)
    for key, value in settings.items():
        section, _, name = key.rpartition(".")
        sections[section].append(f"{name} = {toml_value(value)}")
    return "\n".join("\n".join([f"[{section}]", *lines, ""]) for section, lines in sections.items())


def changed(job: Job, settings: Settings, world: int = 0) -> Job | None:
    """Return the job with other settings, or None if they break a rule of the config."""
    values = {key: value_of(job.given, key) for key in KEYS} | dict(settings)
    loaded = Loaded(config_of(values), {}, set(), [])
    try:
        return job_from(loaded, world=world or job.layout.world, training=True, device=job.config.job.device)
    except ConfigError:
        return None


def _rehearsed(job: Job, other: Job, settings: Settings, hardware: Hardware) -> Candidate:
    recording, tokens = plan_step(other), other.batch.total * other.config.training.seq_len
    speed = speed_of(recording, other.layout, hardware, tokens, is_upper_bound(other))
    new = [f"--{key} {value}" for key, value in settings.items() if value_of(job.given, key) != value]
    new += [f"--world {other.layout.world}"] * (other.layout.world != job.layout.world)
    return Candidate(settings, " ".join(new) or "as it is", recording.peak, speed)


def _state_bytes(job: Job) -> int:
    """Return the bytes of parameters, gradients and optimizer state on all ranks together."""
    model, table = build_model(job)
    trained = trained_parameters([model], table, job.spec.blocks, no_decay=())
    size = sum(p.nbytes * (2 if p.requires_grad else 1) for p in model.parameters())
    return size + optimizer_bytes(trained, job.config)


def _space(job: Job, hardware: Hardware) -> Iterator[Settings]:
    """Yield the settings of the whole search."""
    world, total = job.layout.world, job.batch.total
    for tp in divisors(world):
        for replicate in divisors(world // tp):
            data_parallel = world // tp
            if tp > hardware.node.gpus or total % data_parallel:
                continue
            mesh = {TP: tp, REPLICATE: replicate, SHARD: data_parallel // replicate, GLOBAL: total}
            locals_ = [local for local in divisors(total // data_parallel) if local <= MOST_SAMPLES]
            shards = data_parallel > replicate
            reshard, prefetch = (("always", "never"), (0, 1)) if shards else (("default",), (0,))
            for local, mode, *rest in product(locals_, RECOMPUTED, reshard, prefetch, (1, CHUNKED)):
                yield (
                    mesh | {LOCAL: local, RECOMPUTE: mode} | dict(zip((RESHARD, PREFETCH, CHUNKS), rest, strict=True))
                )


def _changes(job: Job, hardware: Hardware) -> Iterator[tuple[Settings, int]]:
    """Yield what makes a step smaller, with the number of ranks: one thing, all that cost no ranks, more ranks."""
    world, total = job.layout.world, job.batch.total
    cheap: list[dict[str, Any]] = [{CHUNKS: CHUNKED}, {LOCAL: 1, GLOBAL: total}, {RECOMPUTE: "full"}]
    meshes = [{REPLICATE: 1, SHARD: -1}] if job.layout.dp_replicate > 1 else []
    degrees = [tp for tp in divisors(min(world, hardware.node.gpus)) if tp > job.layout.tp]
    meshes += [{TP: tp, SHARD: -1, GLOBAL: total} for tp in degrees]
    everything = {key: value for change in cheap for key, value in change.items()}
    for settings in (*cheap, everything, *meshes, *(everything | mesh for mesh in meshes)):
        yield settings, world
    for more in (2 * world, 4 * world, 8 * world, 16 * world, 32 * world, 64 * world):
        yield {SHARD: -1}, more
        yield {SHARD: -1, CHUNKS: CHUNKED, RECOMPUTE: "full", LOCAL: 1}, more


def _demand(job: Job) -> tuple[int, ...]:
    """Return numbers of which each, when it rises alone, takes more memory."""
    config, layout = job.config, job.layout
    recompute = [*RECOMPUTED].index(config.activation_checkpoint.mode)
    keeps = config.parallelism.fsdp_reshard_after_forward == "never"
    prefetch, chunks = config.parallelism.fsdp_forward_prefetch, config.training.loss_chunks
    return layout.dp_replicate, job.batch.local, recompute, keeps, prefetch, -chunks


def _needs_no_less(job: Job, other: Job) -> bool:
    both = zip(_demand(job), _demand(other), strict=True)
    return job.layout.tp == other.layout.tp and all(one >= another for one, another in both)


def _guess(job: Job, state: int, hardware: Hardware) -> float:
    """Return roughly the seconds of a step: what is computed, with tensor parallel, or sent if that takes longer."""
    layout, training, shape = job.layout, job.config.training, job.shape
    parameters, samples = state / 16, job.batch.local * job.batch.accumulation
    flops = 6 * parameters + 6 * shape.layers * shape.heads * 2 * shape.head_dim * training.seq_len
    flops *= RECOMPUTED[job.config.activation_checkpoint.mode] * samples * training.seq_len / layout.tp
    activations = Collective("all-gather", "tp", layout.tp, "", 2 * training.seq_len * shape.heads * shape.head_dim)
    weights = Collective("all-gather", "dp_shard", layout.dp_shard, "", int(2 * parameters / layout.tp))
    reduced = Collective("all-reduce", "dp_replicate", layout.dp_replicate, "", int(4 * parameters / layout.splits))
    gathers = 1 if job.config.parallelism.fsdp_reshard_after_forward == "never" else 2

    def seconds(collective: Collective) -> float:
        near, far = traffic(collective, layout, hardware.node.gpus)
        return max(near / hardware.link_rate, far / hardware.network_rate)

    computing = flops / hardware.peak("bfloat16") / hardware.efficiencies["bfloat16"].share
    computing += seconds(activations) * 8 * shape.layers * samples
    return max(computing, job.batch.accumulation * ((gathers + 2) * seconds(weights) + seconds(reduced)))
