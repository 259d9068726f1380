"""Pipeline stages: which modules each has, which rank runs it, and how long an order of actions leaves ranks idle.

An order has a row for each pipeline rank, of actions as torch writes them: "2F0" is stage 2's forward pass of
micro-batch 0, B its backward pass, I and W the halves of B (gradients of inputs and of weights), and
"(0F4;3B1)OVERLAP_F_B" two actions that may overlap. Sends follow from the order.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

SINGLE = ("GPipe", "1F1B")
"""Schedules with one stage a rank."""
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
"""Schedules with two stages a rank: the first rank has the first and the last stage."""
IN_ROUNDS = ("Interleaved1F1B", "InterleavedZeroBubble")
"""Schedules that run about as many micro-batches at a time as there are ranks."""

Order = Sequence[Sequence[str]]


@dataclass(frozen=True)
class Stages:
    """The stages of a job. Without pipeline parallel, one stage has everything, and there is no schedule."""

    names: tuple[tuple[str, ...], ...]
    """The modules of each stage in the model's order, such as "tok_embeddings", "layers.0", "norm"."""
    ranks: tuple[tuple[int, ...], ...]
    """The stages of each pipeline rank."""
    schedule: str
    """As the config spells it, such as "1F1B"; empty with a CSV, and without pipeline parallel."""
    micro_batches: int
    """Micro-batches of a step: the whole step is one run of the schedule."""
    size: int
    """Sequences of a micro-batch."""
    csv: tuple[tuple[str, ...], ...] = ()
    """The order that a CSV gives; empty without one."""


class Action(NamedTuple):
    stage: int
    kind: str
    micro_batch: int


def parse(text: str) -> list[Action]:
    """Return the actions of a cell, one after the other; raise ValueError if it is no action."""
    overlap = re.fullmatch(r"\((.*)\)OVERLAP_F_B", text.strip())
    cells = (overlap[1] if overlap else text).split(";")
    parts = [re.fullmatch(r"(\d+)([FBIW])(\d+)", cell.strip()) for cell in cells]
    found = [Action(int(part[1]), part[2], int(part[3])) for part in parts if part]
    if len(found) < len(parts) or (len(found) > 1 and not overlap):
        raise ValueError(f'"{text}" is not an action such as 2F0, 2B0, 2I0, 2W0 or (0F4;3B1)OVERLAP_F_B')
    return found


def split_layers(layers: int, stages: int, first_less: int, last_less: int) -> list[range]:
    """Return the layers of each stage, as TorchTitan splits them; raise ValueError if a stage would be empty.

    What runs before and after the layers counts as `first_less` and `last_less` layers.
    """
    if stages == 1:
        return [range(layers)]
    total = layers + first_less + last_less
    least, more = divmod(total, stages)
    if least < max(1, first_less, last_less):
        weights = f"{layers} layers, {first_less} for the first stage and {last_less} for the last"
        raise ValueError(f"{weights} give {stages} stages {least} or {least + 1} each, with nothing in one of them")
    ends = [min(stage, more) + least * stage - first_less for stage in range(1, stages)]
    return [range(start, end) for start, end in zip([0, *ends], [*ends, layers], strict=True)]


def stages_of_ranks(schedule: str, ranks: int, stages: int) -> tuple[tuple[int, ...], ...]:
    """Return the stages of each rank: there and back for the V shapes, and round by round for all others."""
    if schedule in V_SHAPED:
        return tuple((rank, stages - 1 - rank) for rank in range(ranks))
    return tuple(tuple(range(rank, stages, ranks)) for rank in range(ranks))


def bubble(order: Order, cost: Mapping[str, float]) -> float:
    """Return the fraction of the ranks' time in which they wait, if an action takes `cost` of its kind.

    Sends take no time. Raises ValueError if the actions wait for each other forever.
    """
    rows = [[action for cell in row for action in parse(cell)] for row in order]
    last = max(action.stage for row in rows for action in row)
    ends: dict[Action, float] = {}
    clocks, next_of = [0.0] * len(rows), [0] * len(rows)
    while remaining := [rank for rank, row in enumerate(rows) if next_of[rank] < len(row)]:
        before = sum(next_of)
        for rank in remaining:
            while next_of[rank] < len(rows[rank]):
                action = rows[rank][next_of[rank]]
                needed = [ends.get(key) for key in _waits_for(action, last, ends)]
                if None in needed:
                    break
                start = max([clocks[rank], *filter(None, needed)])
                clocks[rank] = ends[action] = start + cost[action.kind]
                next_of[rank] += 1
        if sum(next_of) == before:
            stuck = [rows[rank][next_of[rank]] for rank in remaining]
            waiting = ", ".join(f"{action.stage}{action.kind}{action.micro_batch}" for action in stuck)
            raise ValueError(f"the actions wait for each other: none of {waiting} can start")
    return 1 - sum(cost[action.kind] for row in rows for action in row) / (len(rows) * max(clocks))


def _waits_for(action: Action, last: int, ends: Mapping[Action, float]) -> list[Action]:
    """Return what must have ended before an action starts: gradients come from a B or an I."""
    stage, kind, number = action
    if kind == "F":
        return [Action(stage - 1, "F", number)] if stage else []
    if kind == "W":
        return [Action(stage, "I", number)]
    above = [Action(stage + 1, "I" if Action(stage + 1, "I", number) in ends else "B", number)]
    return [Action(stage, "F", number), *(above if stage < last else [])]
