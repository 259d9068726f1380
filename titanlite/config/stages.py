"""Pipeline stages: which modules each has, and which rank runs it."""

from dataclasses import dataclass
from math import ceil
from typing import Any, Literal

Schedule = Literal[
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
]
"""torch's schedules: all but its two base classes."""
SINGLE = ("GPipe", "1F1B")
"""Schedules with one stage per rank."""
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
"""Schedules with two stages per rank, where the first rank has the first and the last stage."""
SPLIT_BACKWARD = ("InterleavedZeroBubble", *V_SHAPED)
"""Schedules that compute gradients of inputs and of weights separately."""
IN_ROUNDS = ("Interleaved1F1B", "InterleavedZeroBubble")
"""Schedules that run about as many micro-batches at a time as there are ranks."""
StageModules = tuple[tuple[str, ...], ...]
"""The modules of each stage."""


@dataclass(frozen=True)
class Stages:
    """The stages of a job. Without pipeline parallel there is one stage, and no schedule."""

    names: StageModules
    """The modules of each stage in the model's order, such as "tok_embeddings", "layers.0",
    "norm".
    """
    ranks: tuple[tuple[int, ...], ...]
    """The stages of each pipeline rank."""
    schedule: str
    """As the config spells it, such as "1F1B"; empty without pipeline parallel."""
    micro_batches: int
    """Micro-batches in a step, which is one run of the schedule."""
    size: int
    """Sequences of a micro-batch."""

    @property
    def rank_of(self) -> dict[int, int]:
        """The pipeline rank of every stage."""
        found = dict[int, int]()
        for rank, members in enumerate(self.ranks):
            for stage in members:
                found[stage] = rank
        return found


def fits(schedule: str, ranks: int, stages: int) -> bool:
    """Return whether a schedule runs this many stages on these ranks."""
    each, rest = divmod(stages, ranks)
    if schedule in SINGLE:
        is_right = each == 1
    elif schedule in V_SHAPED:
        is_right = each == 2
    else:
        is_right = each >= 2
    return is_right and rest == 0


def number_of_stages(settings: Any, ranks: int, layers: int) -> int:
    """Return the number of stages that the keys of [parallelism] lead to."""
    if settings.module_fqns_per_model_part:
        return len(settings.module_fqns_per_model_part)
    if settings.pipeline_parallel_layers_per_stage:
        counted = layers + sum(ends_weigh(settings))
        return ceil(counted / settings.pipeline_parallel_layers_per_stage)
    if settings.pipeline_parallel_schedule in SINGLE:
        return ranks
    return 2 * ranks


def fills_stages(settings: Any, ranks: int, layers: int) -> bool:
    """Return whether the keys of [parallelism] give these ranks stages, none of them empty."""
    if ranks == 1:
        return True
    stages = number_of_stages(settings, ranks, layers)
    is_split = settings.module_fqns_per_model_part or split_layers(
        layers, stages, *ends_weigh(settings)
    )
    return fits(settings.pipeline_parallel_schedule, ranks, stages) and bool(is_split)


def ends_weigh(settings: Any) -> tuple[int, int]:
    """Return how many layers the modules before and after the layers count as."""
    return (
        settings.pipeline_parallel_first_stage_less_layers,
        settings.pipeline_parallel_last_stage_less_layers,
    )


def split_layers(layers: int, stages: int, first: int, last: int) -> list[range]:
    """Return the layers of each stage, split as in TorchTitan, or [] if that would leave a stage
    empty.

    The modules before and after the layers count as `first` and `last` layers.
    """
    least, more = divmod(layers + first + last, stages)
    if least < max(1, first, last):
        return []
    ends = [least * stage + min(stage, more) - first for stage in range(1, stages)]
    found = list[range]()
    for start, end in zip([0, *ends], [*ends, layers], strict=True):
        found.append(range(start, end))
    return found


def stages_of_ranks(schedule: str, ranks: int, stages: int) -> tuple[tuple[int, ...], ...]:
    """Return the stages of each rank: there and back in V-shaped schedules, else round-robin."""
    if schedule in V_SHAPED:
        return tuple((rank, stages - 1 - rank) for rank in range(ranks))
    return tuple(tuple(range(rank, stages, ranks)) for rank in range(ranks))
