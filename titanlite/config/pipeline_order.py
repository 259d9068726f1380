"""Descriptions of a pipeline schedule.

An order has a row of actions for each pipeline rank, in torch's notation: "2F0" is stage 2's
forward pass of micro-batch 0, B a backward pass, I and W the halves of B (gradients of inputs and
of weights), and "(0F4;3B1)OVERLAP_F_B" two actions that may overlap.
"""

import re
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from titanlite.config.stages import SPLIT_BACKWARD, Stages
from titanlite.errors import format_table

PipelineOrder = Sequence[Sequence[str]]


class Action(NamedTuple):
    stage: int
    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


def parse(text: str) -> list[Action]:
    """Return the actions in a cell, in order."""
    found = re.findall(r"(\d+)([FBIW])(\d+)", text)
    return [Action(int(stage), kind, int(number)) for stage, kind, number in found]


def bubble(stages: Stages) -> float:
    """Return the fraction of a step that ranks spend waiting.

    It assumes that stages cost the same, a backward pass costs two forward passes, and sends cost
    nothing. With fewer than two micro-batches per rank, V-shaped schedules wait longer.
    """
    ranks = len(stages.ranks)
    work = stages.micro_batches * len(stages.ranks[0])
    if stages.schedule in SPLIT_BACKWARD:
        work *= 3  # ranks wait only for thirds of an action
    return (ranks - 1) / (work + ranks - 1)


def most_kept(row: Sequence[str]) -> int:
    """Return the most forward passes whose activations a rank holds at one time."""
    change = {"F": 1, "B": -1, "I": 0, "W": -1}
    return max(accumulate(change[action.kind] for cell in row for action in parse(cell)))


def headline(stages: Stages) -> str:
    """Return one line: schedule, stages, micro-batches and bubble."""
    sequences = "1 sequence"
    if stages.size != 1:
        sequences = f"{stages.size} sequences"
    return (
        f"{stages.schedule}, {len(stages.names)} stages on {len(stages.ranks)} ranks, "
        f"{stages.micro_batches:,} micro-batches of {sequences}; "
        f"ranks wait {bubble(stages):.1%} of a step, by estimate"
    )


def describe(stages: Stages, order: PipelineOrder) -> str:
    """Return the modules of every stage, and every rank's actions in a step."""
    rows = []
    for rank, row in enumerate(order):
        rows.append((f"{rank}", f"{most_kept(row)}", " ".join(row)))
    actions = format_table(rows, ("rank", "kept", "actions"))
    return "\n\n".join((f"pipeline: {headline(stages)}", stage_table(stages), actions, _LEGEND))


def stage_table(stages: Stages) -> str:
    """Return the pipeline rank and the modules of every stage."""
    rows = []
    for stage, names in enumerate(stages.names):
        rows.append((f"{stage}", f"{stages.rank_of[stage]}", _shortened(names)))
    return format_table(rows, ("stage", "rank", "modules"))


_LEGEND = """\
2F0: forward pass of stage 2 and micro-batch 0; B: backward pass; I and W: its two halves.
kept: the most forward passes whose activations a rank keeps at once. \
The estimate assumes that stages cost the same,
a backward pass costs two forward passes, and sends cost nothing."""


def _shortened(names: Sequence[str]) -> str:
    """Return the names; of several blocks, only the first and the last."""
    blocks = [name for name in names if name.rpartition(".")[2].isdecimal()]
    inner = ", ".join(blocks[1:-1])
    if inner:
        return ", ".join(names).replace(f", {inner},", " …")
    return ", ".join(names)
