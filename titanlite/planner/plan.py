"""The plan of a job: a step's memory, communication, the bound of its time, and whether it fits.

`to_json` gives all of it; the tables show nothing more. docs/planning.md explains the names."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from titanlite.config.job import Job
from titanlite.config.layout import DIMENSIONS, EXPERT_DIMENSIONS
from titanlite.config.resharding import describe_choice, is_to_choose
from titanlite.errors import UserError, format_bytes
from titanlite.observe.throughput import TokenFlops, flops_per_token
from titanlite.parallel import fsdp
from titanlite.parallel.build import build_model
from titanlite.planner.depth import fullest, plan_ranks
from titanlite.planner.hardware import GIB, Hardware, with_source
from titanlite.planner.record import KINDS, Totals
from titanlite.planner.resharding import kept_gathered, verdict
from titanlite.planner.speed import ASSUMED, Speed, is_compiled, ranks_in_a_node, speed_of_job

VERSION = 2
"""The version of the JSON, raised when a name is removed or changes its meaning."""


@dataclass(frozen=True)
class Traffic:
    """What a step communicates over one dimension of the mesh, with one kind of collective."""

    dimension: str
    kind: str
    ranks: int
    ranks_in_node: int
    dtype: str
    number: int
    bytes: int
    """Bytes of the whole tensors."""

    @property
    def where(self) -> str:
        if self.ranks_in_node == self.ranks:
            return "in the node"
        if self.ranks_in_node == 1:
            return "between nodes"
        return f"{self.ranks_in_node} in a node"


@dataclass(frozen=True)
class Plan:
    """The facts about a job's step before it runs."""

    job: Job
    hardware: Hardware
    totals: Totals
    speed: Speed
    flops_per_token: int
    """FLOPs of the model as MFU counts them, without recomputation."""
    tokens: float = 0
    """Tokens to train on; 0 if not given."""
    imbalance: float = 1
    """The tokens that the fullest rank receives for its experts, as a multiple of the mean."""
    balanced_peak: int = 0
    """The peak if all ranks receive equally many."""
    ranks: Sequence[Totals] = ()
    """The totals of each rank of a pipeline; `totals` are those of the fullest one."""
    resharding: str = ""
    """What parallelism.fsdp_reshard_after_forward "auto" stands for, and why."""

    @property
    def fits(self) -> bool:
        return self.hardware.fits(self.totals.peak, self.on_host)

    @property
    def on_host(self) -> int:
        """Return the bytes of the host's memory that a rank needs."""
        return self.totals.at_peak["host"]

    @property
    def without_flushes(self) -> float:
        """Return the most bytes that torch's allocator takes if it never flushes its cache."""
        reserve = self.hardware.reserve
        gathers = fsdp.is_needed(self.job)
        return self.totals.peak * (reserve.allocator if gathers else reserve.allocator_alone)

    @cached_property
    def traffic(self) -> list[Traffic]:
        """Return the collectives of a step by dimension, outermost first."""
        return traffic_of(self.job, self.totals, self.hardware.node.gpus)

    @property
    def assumptions(self) -> list[str]:
        """Return the assumptions behind the verdict on memory."""
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
            texts.append("a sent tensor is freed once its send has been waited for")
        if self.imbalance > 1:
            balanced = f"at balance the peak is {format_bytes(self.balanced_peak)}"
            texts.append(f"a rank receives {self.imbalance:g} times the mean of tokens; {balanced}")
        elif self.job.shape.experts:
            texts.append("all experts get equally many tokens (--imbalance plans for others)")
        return texts

    @property
    def rates(self) -> dict[str, Any]:
        """Return the rates that the bound of a step allows."""
        per_gpu = self.speed.tokens_per_gpu
        days = None
        if self.tokens:
            days = self.speed.days(self.tokens)
        return {
            "seconds": self.speed.bound,
            "tokens_per_second_per_gpu": per_gpu,
            "mfu_percent": 100 * per_gpu * self.flops_per_token / self.hardware.peak("bfloat16"),
            "days": days,
        }

    def to_json(self) -> dict[str, Any]:
        """Return the whole plan, in bytes and seconds."""
        config = self.job.config
        layout = self.job.layout
        batch = self.job.batch
        totals = self.totals
        speed = self.speed
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
                "resharding": self.resharding,
            },
            "hardware": asdict(self.hardware),
            "memory": {
                "fits": self.fits,
                "peak": totals.peak,
                "moment": totals.moment,
                "host": self.on_host,
                "usable": self.hardware.usable_bytes,
                "without_flushes": self.without_flushes,
                "imbalance": self.imbalance,
                "balanced_peak": self.balanced_peak,
                "at_peak": {**dict.fromkeys(KINDS, 0), **totals.at_peak},
                "static": dict(totals.static),
                "assumptions": self.assumptions,
            },
            "communication": [{**asdict(row), "where": row.where} for row in self.traffic],
            "speed": {
                "bound": self.rates,
                "bound_by": speed.binding,
                "terms": [asdict(term) for term in speed.terms],
                "assumptions": [*self.hardware.assumptions, *ASSUMED],
            },
            "ranks": [self.rank(number) for number in range(len(self.ranks))],
        }

    def rank(self, number: int) -> dict[str, Any]:
        """Return what a rank of the pipeline needs and sends."""
        totals = self.ranks[number]
        traffic = traffic_of(self.job, totals, self.hardware.node.gpus)
        return {
            "stages": self.job.stages.ranks[number],
            "peak": totals.peak,
            "moment": totals.moment,
            "static": dict(totals.static),
            "communication": [{**asdict(row), "where": row.where} for row in traffic],
        }


def make_plan(job: Job, hardware: Hardware, tokens: float = 0, imbalance: float = 1) -> Plan:
    """Rehearse a job's step."""
    ranks = plan_ranks(job)
    resharding = ""
    if is_to_choose(job):
        kept = kept_gathered(job)
        of_kept = plan_ranks(kept)
        value, why = verdict(fullest(of_kept).peak, hardware)
        why += f'; with "default" it needs {format_bytes(fullest(ranks).peak)}'
        resharding = describe_choice(value, why)
        if value == "never":
            job = kept
            ranks = of_kept
    balanced_peak = fullest(ranks).peak
    if imbalance > 1:
        if not job.shape.experts:
            raise UserError(f"--imbalance {imbalance:g}: the model has no experts; leave it out")
        ranks = plan_ranks(job, imbalance=imbalance)
    speed = speed_of_job(job, ranks, hardware)
    flops = token_flops(job).total
    of_pipeline: Sequence[Totals] = ()
    if job.layout.pp > 1:
        of_pipeline = ranks
    return Plan(
        job=job,
        hardware=hardware,
        totals=fullest(ranks),
        speed=speed,
        flops_per_token=flops,
        tokens=tokens,
        imbalance=imbalance,
        balanced_peak=balanced_peak,
        ranks=of_pipeline,
        resharding=resharding,
    )


def token_flops(job: Job) -> TokenFlops:
    """Return the FLOPs of a token, without recomputation."""
    model, table = build_model(job)
    seq_len = job.config.training.seq_len
    return flops_per_token(model.named_parameters(), table, job.shape, seq_len, job.spec.blocks)


def reserve_text(hardware: Hardware) -> str:
    """Describe the part of a GPU's memory that is kept free, with its source."""
    reserve = hardware.reserve
    return with_source(
        f"{reserve.gib:g} GiB of the GPU stay free for CUDA, NCCL and fragments", reserve.source
    )


def traffic_of(job: Job, totals: Totals, per_node: int) -> list[Traffic]:
    """Sum a step's collectives by dimension, kind, group size and type, outermost dimension
    first.
    """
    order = [*DIMENSIONS, *EXPERT_DIMENSIONS, "world", "host"]
    numbers = Counter[Any]()
    sizes = Counter[Any]()
    for one, number in totals.number.items():
        near = ranks_in_a_node(one, job.layout, per_node)
        place = order.index(one.dimension.split(" x ")[0])
        key = place, one.dimension, one.kind, one.ranks, near, one.dtype
        numbers[key] += number
        sizes[key] += totals.sent[one]
    return [Traffic(*key[1:], number=numbers[key], bytes=sizes[key]) for key in sorted(numbers)]
