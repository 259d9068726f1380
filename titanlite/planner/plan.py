"""The plan of a job: a step's memory, communication and time, and whether it fits.

`to_json` gives all of it; the tables and the page show nothing else. docs/planning.md explains the
names."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any

from titanlite.config.job import Job
from titanlite.errors import UserError, format_bytes
from titanlite.layout import DIMENSIONS, EXPERT_DIMENSIONS
from titanlite.planner.bounds import Facts
from titanlite.planner.depth import fullest, plan_ranks
from titanlite.planner.hardware import GIB, Hardware, with_source
from titanlite.planner.record import KINDS, Recording
from titanlite.planner.search import Candidate, changes
from titanlite.planner.speed import WAITING, Speed, is_compiled, ranks_in_a_node, speed_of_job

VERSION = 1
"""Of the JSON; another one if a name goes or changes its meaning."""


@dataclass(frozen=True)
class Traffic:
    """What a step communicates over one dimension of the mesh, in one way."""

    dimension: str
    kind: str
    ranks: int
    ranks_in_node: int
    dtype: str
    number: int
    bytes: int
    """Of the whole tensors."""

    @property
    def where(self) -> str:
        if self.ranks_in_node == self.ranks:
            return "in the node"
        return "between nodes" if self.ranks_in_node == 1 else f"{self.ranks_in_node} in a node"


@dataclass(frozen=True)
class Plan:
    """The facts about a job's step before it runs."""

    job: Job
    hardware: Hardware
    recording: Recording
    speed: Speed
    flops_per_token: int
    """Of the model, as MFU counts them: recomputation is left out."""
    tokens: float = 0
    """To train on; 0 if not given."""
    imbalance: float = 1
    """How many times the mean the fullest rank receives for its experts."""
    balanced_peak: int = 0
    """The peak where no rank receives more than another."""
    changes: Sequence[Candidate] = ()
    """What would fit, if this does not."""
    ranks: Sequence[tuple[Recording, Speed]] = ()
    """Those of each rank of a pipeline; the plan's are the fullest one's."""

    @property
    def fits(self) -> bool:
        return self.hardware.fits(self.recording.peak, self.on_host)

    @property
    def on_host(self) -> int:
        """Return the bytes of the host's memory that a rank needs."""
        return self.recording.at_peak["host"]

    @property
    def without_flushes(self) -> float:
        """Return the most bytes that torch's allocator takes if it never flushes its cache."""
        return self.recording.peak * self.hardware.reserve.allocator

    @cached_property
    def traffic(self) -> list[Traffic]:
        """Return the collectives of a step by dimension, outermost first."""
        return traffic_of(self.job, self.recording, self.hardware.node.gpus)

    @property
    def assumptions(self) -> list[str]:
        """Return the assumptions of the verdict on memory."""
        texts = [reserve_text(self.hardware)]
        if is_compiled(self.job):
            texts.append("compiled: fused kernels write no temporaries, as inductor's on one H100")
        if self.on_host:
            host = self.hardware.node.host
            texts.append(
                f"each of {self.hardware.node.gpus} ranks needs {self.on_host / GIB:.2f} GiB of "
                f"{host.gib:g} GiB of the host, before torch rounds what it locks"
            )
        if self.ranks:
            texts.append("what a stage has sent is freed when the send has been waited for")
        if self.imbalance > 1:
            balanced = f"at balance the peak is {format_bytes(self.balanced_peak)}"
            texts.append(f"a rank receives {self.imbalance:g} times the mean of tokens; {balanced}")
        elif self.job.shape.experts:
            texts.append("all experts get equally many tokens (--imbalance plans for others)")
        return texts

    def rates(self, seconds: float) -> dict[str, Any]:
        """Return the rates of a step that takes so long."""
        per_gpu = self.speed.tokens_per_gpu(seconds)
        return {
            "seconds": seconds,
            "tokens_per_second_per_gpu": per_gpu,
            "mfu_percent": 100 * per_gpu * self.flops_per_token / self.hardware.peak("bfloat16"),
            "days": self.speed.days(self.tokens, seconds) if self.tokens else None,
        }

    def to_json(self) -> dict[str, Any]:
        """Return the whole plan, in bytes and seconds."""
        config, layout, batch = self.job.config, self.job.layout, self.job.batch
        recording, speed = self.recording, self.speed
        return {
            "version": VERSION,
            "job": {
                "model": config.model.name,
                "flavor": config.model.flavor,
                "description": config.job.description,
                "world": layout.world,
                "layout": dict(zip(DIMENSIONS, layout.degrees, strict=True)),
                "batch": {**asdict(batch), "total": batch.total},
                "seq_len": config.training.seq_len,
                "tokens_per_step": speed.tokens,
                "recompute": config.activation_checkpoint.mode,
                "compile": is_compiled(self.job),
            },
            "hardware": asdict(self.hardware),
            "memory": {
                "fits": self.fits,
                "peak": recording.peak,
                "moment": recording.moment,
                "host": self.on_host,
                "usable": self.hardware.usable_bytes,
                "without_flushes": self.without_flushes,
                "imbalance": self.imbalance,
                "balanced_peak": self.balanced_peak,
                "at_peak": {**dict.fromkeys(KINDS, 0), **recording.at_peak},
                "static": dict(recording.static),
                "phases": [*phases_of(recording)],
                "assumptions": self.assumptions,
            },
            "communication": [{**asdict(row), "where": row.where} for row in self.traffic],
            "speed": {
                "bound": self.rates(speed.bound),
                "bound_by": speed.binding,
                "terms": [asdict(term) for term in speed.terms],
                "estimate": self.rates(speed.estimate),
                "exposed": dict(speed.exposed),
                "spans": [asdict(span) for span in speed.spans if span.lane != WAITING],
                "assumptions": list(speed.assumptions),
            },
            "changes": [*map(_change, self.changes)],
            "ranks": [self.rank(number) for number in range(len(self.ranks))],
        }

    def rank(self, number: int) -> dict[str, Any]:
        """Return what a rank of the pipeline needs, and how long it waits."""
        recording, speed = self.ranks[number]
        traffic = traffic_of(self.job, recording, self.hardware.node.gpus)
        return {
            "stages": self.job.stages.ranks[number],
            "peak": recording.peak,
            "moment": recording.moment,
            "static": dict(recording.static),
            "communication": [{**asdict(row), "where": row.where} for row in traffic],
            "exposed": dict(speed.exposed),
        }


def _change(change: Candidate) -> dict[str, Any]:
    return {
        "overrides": change.option.split(),
        "peak": change.peak,
        "bound": change.speed.bound,
        "estimate": change.speed.estimate,
    }


def make_plan(job: Job, hardware: Hardware, tokens: float = 0, imbalance: float = 1) -> Plan:
    """Rehearse a job's step; if it does not fit, also what would."""
    ranks = plan_ranks(job)
    balanced_peak = fullest(ranks).peak
    if imbalance > 1:
        if not job.shape.experts:
            raise UserError(f"--imbalance {imbalance:g}: the model has no experts; leave it out")
        ranks = plan_ranks(job, imbalance=imbalance)
    flops = Facts(job, hardware).flops
    pairs = [*zip(ranks, speed_of_job(job, ranks, hardware), strict=True)]
    recording, speed = max(pairs, key=lambda pair: pair[0].peak)
    plan = Plan(job, hardware, recording, speed, flops, tokens, imbalance, balanced_peak)
    if job.layout.pp > 1:
        plan = replace(plan, ranks=pairs)
    return plan if plan.fits else replace(plan, changes=changes(job, hardware))


def reserve_text(hardware: Hardware) -> str:
    """Describe the part of a GPU's memory that is kept free, with its source."""
    reserve = hardware.reserve
    return with_source(
        f"{reserve.gib:g} GiB of the GPU stay free for CUDA, NCCL and fragments", reserve.source
    )


def traffic_of(job: Job, recording: Recording, per_node: int) -> list[Traffic]:
    """Sum up a step's collectives by dimension, kind, group size and type; outer dimensions
    first.
    """
    order = [*DIMENSIONS, *EXPERT_DIMENSIONS, "world", "host"]
    numbers, sizes = Counter[Any](), Counter[Any]()
    for one, number in recording.collectives().items():
        near = ranks_in_a_node(one, job.layout, per_node)
        place = order.index(one.dimension.split(" x ")[0])
        key = place, one.dimension, one.kind, one.ranks, near, one.dtype
        numbers[key] += number
        sizes[key] += number * one.bytes
    return [Traffic(*key[1:], number=numbers[key], bytes=sizes[key]) for key in sorted(numbers)]


def phases_of(recording: Recording) -> Iterator[dict[str, Any]]:
    """Yield the phases in order, each with the moment of its most bytes."""
    for phase, group in groupby(recording.operations, key=lambda operation: operation.phase):
        operations = list(group)
        fullest = max(operations, key=lambda operation: operation.live)
        yield {
            "phase": phase,
            "live": fullest.live,
            "by_kind": dict(zip(KINDS, fullest.by_kind, strict=False)),
            "flops": sum(operation.flops for operation in operations),
            "moved": sum(operation.moved for operation in operations),
            "collectives": sum(operation.collective is not None for operation in operations),
        }
