"""Search for the fastest plans of a config that fit, rehearsing them in the order of their bounds.

A plan is not rehearsed if the config's rules refuse it, if its parameters, gradients and optimizer
state alone do not fit, or if enough faster plans are known."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf, prod
from typing import Any

import torch

from titanlite.config.job import Job, job_from
from titanlite.config.layout import divisors
from titanlite.config.load import ConfigError, Loaded
from titanlite.config.optimizer_state import place_of_state
from titanlite.config.pipeline_order import bubble
from titanlite.config.resharding import RESHARD
from titanlite.config.schema import with_values
from titanlite.config.section import value_of
from titanlite.observe.progress import track
from titanlite.optim import optimizer_bytes, trained_parameters
from titanlite.parallel.build import build_model
from titanlite.planner.depth import fullest, ranks_in
from titanlite.planner.fake_world import FakeWorld
from titanlite.planner.hardware import Hardware
from titanlite.planner.plan import token_flops
from titanlite.planner.record import Collective, Totals
from titanlite.planner.speed import Speed, speed_of, speed_of_job

TP = "parallelism.tensor_parallel_degree"
REPLICATE = "parallelism.data_parallel_replicate_degree"
SHARD = "parallelism.data_parallel_shard_degree"
LOCAL = "training.local_batch_size"
CP = "parallelism.context_parallel_degree"
EP = "parallelism.expert_parallel_degree"
PP = "parallelism.pipeline_parallel_degree"
SCHEDULE = "parallelism.pipeline_parallel_schedule"
MICRO_BATCH = "parallelism.pipeline_parallel_microbatch_size"
GLOBAL = "training.global_batch_size"
RECOMPUTE = "activation_checkpoint.mode"
FLOAT8 = "quantize.linear.float8.enable"

RECOMPUTE_MODES = ("full", "selective", "none")
"""From the least memory to the most."""
MOST_SAMPLES = 16
MOST_PP = 16
LEAST_TOKENS = 4096
"""The largest local batch and the most pipeline ranks tried, and the fewest tokens of a sequence
that a rank has under context parallel.
"""

Settings = Mapping[str, Any]
"""Values that override a config's, by key."""


@dataclass(frozen=True)
class Candidate:
    """A plan that was rehearsed and fits."""

    settings: Settings
    job: Job
    peak: int
    speed: Speed

    @property
    def seconds(self) -> float:
        """The bound of a step, including the time that a pipeline's ranks wait."""
        return _with_bubble(self.job, self.speed.bound)


@dataclass(frozen=True)
class SearchResult:
    """The result of a search, and how much of the space it covered."""

    best: Sequence[Candidate]
    """Plans that fit, in the order of their bounds."""
    counts: Mapping[str, int]
    """How many were "rehearsed", "ruled out" (by their state alone, or
    because the best are faster than their bounds), and "not reached in time"."""
    needed: tuple[float, str] = (0, "")
    """The smallest demand in bytes among the plans that did not fit, and that plan."""


def search(job: Job, hardware: Hardware, max_seconds: float = 60, most: int = 10) -> SearchResult:
    """Return the fastest plans for a job's model, global batch and number of ranks."""
    end = time.monotonic() + max_seconds
    model = _Model(job)
    fitting = list[Candidate]()
    counts = dict.fromkeys(("rehearsed", "ruled out", "not reached in time"), 0)
    needed = inf, ""
    legal = list[tuple[tuple[Any, ...], Settings, Job]]()
    for settings in space(job, hardware):
        state = model.state * settings[REPLICATE] / job.layout.world
        if state > hardware.usable_bytes:
            counts["ruled out"] += 1
            needed = min(needed, (state, "parameters, gradients and optimizer state alone"))
            continue
        other = changed(job, settings)
        if other:
            legal.append((_first(other, model.bound(other, hardware)), settings, other))
    legal.sort(key=lambda one: one[0])
    with FakeWorld() as world:
        for order, settings, other in track(legal, len(legal), "layouts"):
            slowest = inf
            if len(fitting) >= most:
                slowest = fitting[most - 1].seconds
            if order[0] > slowest:
                counts["ruled out"] += 1
                continue
            if counts["rehearsed"] and time.monotonic() > end:
                counts["not reached in time"] += 1
                continue
            counts["rehearsed"] += 1
            ranks = ranks_in(world, other, limit=hardware.usable_bytes)
            full = fullest(ranks)
            if hardware.fits(full.peak, full.at_peak["host"]):
                speed = speed_of_job(other, ranks, hardware)
                fitting.append(Candidate(settings, other, full.peak, speed))
                fitting.sort(key=lambda one: (one.seconds, one.speed.order, one.peak))
            else:
                needed = min(needed, (full.peak, f"{other.layout}, rehearsed,"))
    return SearchResult(fitting[:most], counts, needed)


def changed(job: Job, settings: Settings) -> Job | None:
    """Return the job with other settings, or None if they break a rule of the config."""
    loaded = Loaded(with_values(job.given, settings), {}, set(), [])
    device = job.config.job.device
    try:
        return job_from(loaded, world=job.layout.world, training=True, device=device)
    except ConfigError:
        return None


def space(job: Job, hardware: Hardware) -> Iterator[Settings]:
    """Yield the settings of the whole search."""
    world = job.layout.world
    total = job.batch.total
    settings = job.config.parallelism
    degrees = divisors(world)
    seq_len = job.config.training.seq_len
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
        mesh = {**dict(zip(meshes, values, strict=True)), SHARD: shard, GLOBAL: total}
        axes: dict[str, Sequence[Any]] = {
            LOCAL: [n for n in divisors(share) if n <= MOST_SAMPLES],
            RECOMPUTE: RECOMPUTE_MODES,
            RESHARD: ("default",),
        }
        if shard > 1:
            axes[RESHARD] = ("always", "never")
        if value_of(job.given, FLOAT8):
            axes[FLOAT8] = (True, False)
        if mesh[PP] > 1:  # a step runs the schedule once
            axes |= {LOCAL: [share], RESHARD: ["default"], MICRO_BATCH: (1, 2)}
            own = settings.pipeline_parallel_schedule
            axes[SCHEDULE] = sorted({own, "1F1B", "Interleaved1F1B"})
        for values in product(*axes.values()):
            yield mesh | dict(zip(axes, values, strict=True))


class _Model:
    """Facts about a job's model that need no rehearsal."""

    def __init__(self, job: Job) -> None:
        model, table = build_model(job)
        trained = trained_parameters([model], table, job.spec.blocks, no_decay=())
        named = [*model.named_parameters()]
        self._flops = token_flops(job)
        self._layers = job.shape.layers
        self._numel = sum(parameter.numel() for _, parameter in named)
        # There is no backward pass below the first trained block.
        back = range(self._layers - self._flops.blocks, self._layers)
        prefixes = tuple(f"{job.spec.blocks}.{number}." for number in back)
        self._again = sum(item.numel() for name, item in named if name.startswith(prefixes))
        self._trained = sum(item.parameter.numel() for item in trained)
        embeddings = [p.size(1) for name, p in named if table[name].tensor == "embedding"]
        self._width = min(embeddings, default=0)
        kept = sum(parameter.nbytes for _, parameter in named)
        kept += sum(item.parameter.nbytes for item in trained)
        self.state = kept
        """Bytes that all ranks together have on their GPUs between steps."""
        if place_of_state(job.config) == "device":
            self.state += optimizer_bytes(trained, job.config)
        if job.config.training.enable_cpu_offload:
            self.state = 0

    def bound(self, job: Job, hardware: Hardware) -> tuple[float, float]:
        """Return the sort key of a job: the bound of its FLOPs, and of gathers, reductions and
        tensor parallel's collectives. Experts count like other parameters.
        """
        layout = job.layout
        training = job.config.training
        dtype = training.mixed_precision_param
        reduced = training.mixed_precision_reduce
        is_full = job.config.activation_checkpoint.mode == "full"
        is_kept = job.config.parallelism.fsdp_reshard_after_forward == "never" or layout.pp > 1
        samples = job.batch.local * job.batch.accumulation
        tokens = samples * training.seq_len / layout.cp
        part = layout.tp * layout.pp
        flops = self._flops.total
        if is_full:
            flops += self._flops.again + self._flops.attention_again
        size = getattr(torch, dtype).itemsize
        sum_size = getattr(torch, reduced).itemsize
        gathered = self._numel
        if not is_kept:
            gathered += self._again
        steps = job.batch.accumulation
        sums_once = job.config.parallelism.defer_gradient_sync is True
        if sums_once or layout.pp > 1 or layout.max_shard_degree == 1:
            steps = 1
        passes = self._layers + (1 + is_full) * self._flops.blocks
        collectives = {
            ("all-gather", "dp_shard", layout.dp_shard): (
                job.batch.accumulation * gathered * size / part
            ),
            ("reduce-scatter", "dp_shard", layout.dp_shard): (
                steps * self._trained * sum_size / part
            ),
            ("all-reduce", "dp_replicate", layout.dp_replicate): (
                steps * self._trained * sum_size / part / layout.dp_shard
            ),
            ("all-gather", "tp", layout.tp): (4 * passes * tokens * self._width * size / layout.pp),
        }
        sent = Counter[Collective]()
        for (kind, dimension, ranks), amount in collectives.items():
            if ranks > 1:
                sent[Collective(kind, dimension, ranks, dtype, 0)] = int(amount)
        product_dtype = dtype
        if value_of(job.config, FLOAT8):
            product_dtype = "float8"
        of_rank = Counter({product_dtype: int(flops * tokens / part)})
        totals = Totals({}, {}, of_rank, Counter(), sent, sent)
        return speed_of(totals, layout, hardware, tokens=1).order


def _with_bubble(job: Job, seconds: float) -> float:
    if job.layout.pp > 1:
        return seconds / (1 - bubble(job.stages))
    return seconds


def _first(job: Job, bound: tuple[float, float]) -> tuple[Any, ...]:
    """Return the key that sorts a job before its rehearsal: by bound; among equal ones, those that
    recompute come first, since they are likelier to fit, then those that communicate less.
    """
    recomputes = job.config.activation_checkpoint.mode != "none"
    return _with_bubble(job, bound[0]), not recomputes, bound[1]
