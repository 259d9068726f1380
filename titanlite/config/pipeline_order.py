"""The order of the stages on pipeline ranks: read, checked, described, and the waits that follow
from it.

An order has a row for each pipeline rank, of actions as torch writes them: "2F0" is stage 2's
forward pass of micro-batch 0, B its backward pass, I and W the halves of B (gradients of inputs and
of weights), and "(0F4;3B1)OVERLAP_F_B" two actions that may overlap. Sends follow from the order.
"""

import csv
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, product
from pathlib import Path
from typing import NamedTuple

from titanlite.config.stages import Rows, Stages
from titanlite.errors import format_table

COST = {"F": 1, "B": 2, "I": 1, "W": 1}
"""Time of each kind of action, relative to a forward pass."""

Order = Sequence[Sequence[str]]


class Action(NamedTuple):
    stage: int
    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


def parse(text: str) -> list[Action]:
    """Return the actions in a cell, in their order; raise ValueError if the text is not one that
    torch writes.
    """
    overlap = re.fullmatch(r"\((.*)\)OVERLAP_F_B", text.strip())
    cells = (overlap[1] if overlap else text).split(";")
    parts = [re.fullmatch(r"(\d+)([FBIW])(\d+)", cell.strip()) for cell in cells]
    found = [Action(int(part[1]), part[2], int(part[3])) for part in parts if part]
    if len(found) < len(parts) or (len(found) > 1 and not overlap):
        raise ValueError(
            f'"{text}" is not an action such as 2F0, 2B0, 2I0, 2W0 or (0F4;3B1)OVERLAP_F_B'
        )
    return found


def read_csv(path: str) -> Rows:
    """Return the rows of a file without empty cells; raise OSError or ValueError."""
    with Path(path).open(newline="", encoding="utf-8") as file:
        return tuple(tuple(filter(None, map(str.strip, row))) for row in csv.reader(file))


def stages_of(order: Order) -> tuple[tuple[int, ...], ...]:
    """Return the stages of each rank."""
    return tuple(
        tuple(sorted({action.stage for cell in row for action in parse(cell)})) for row in order
    )


def faults_of(order: Order, ranks: int, micro_batches: int) -> Iterator[str]:
    """Yield the faults of an order that should run each micro-batch through all stages once."""
    if len(order) != ranks:
        yield f"has {len(order)} rows for {ranks} pipeline ranks"
    kinds, rows = defaultdict[tuple[int, int], str](str), defaultdict[int, set[int]](set)
    for row, cells in enumerate(order, 1):
        try:
            for action in (action for cell in cells for action in parse(cell)):
                rows[action.stage].add(row)
                kinds[action.stage, action.micro_batch] += action.kind
        except ValueError as error:
            yield f"row {row}: {error}"
            return
    stages, numbers = range(len(rows)), range(micro_batches)
    yield from (f"row {row} has no action" for row, cells in enumerate(order, 1) if not cells)
    shared = {
        stage: " and ".join(map(str, sorted(of))) for stage, of in rows.items() if len(of) > 1
    }
    yield from (f"stage {stage} is in rows {of}" for stage, of in shared.items())
    if rows.keys() - set(stages) or {number for _, number in kinds} != set(numbers):
        found = f"{len(rows)} stages and {len({number for _, number in kinds})} micro-batches"
        yield f"has {found}; a step has {micro_batches} micro-batches, and both are counted from 0"
        return
    for stage, number in product(stages, numbers):
        if "".join(sorted(kinds[stage, number])) not in ("BF", "FIW"):
            found = ", ".join(kinds[stage, number]) or "no action"
            yield (
                f"has {found} for micro-batch {number} of stage {stage}; "
                "needed are F and B, or F, I and W"
            )
            return
    try:
        bubble(order, COST)
    except ValueError as error:
        yield str(error)


def numbered_by_last_stage(order: Order) -> tuple[Order, list[int]]:
    """Renumber micro-batches by their forward passes on the last stage; return the order and the
    old numbers.
    """
    actions = [action for row in order for cell in row for action in parse(cell)]
    last = max(action.stage for action in actions)
    old = [action.micro_batch for action in actions if (action.stage, action.kind) == (last, "F")]

    def renumber(digits: re.Match[str]) -> str:
        return str(old.index(int(digits[0])))

    return [[re.sub(r"(?<=[FBIW])\d+", renumber, cell) for cell in row] for row in order], old


def bubble(order: Order, cost: Mapping[str, float]) -> float:
    """Return the fraction of time that ranks wait, if an action takes `cost` of its kind.

    Sends take no time. Raises ValueError if the actions wait for each other forever.
    """
    rows = [[parse(cell) for cell in row] for row in order]
    actions = [action for row in rows for cell in row for action in cell]
    last = max(action.stage for action in actions)
    ends: dict[Action, float] = {}
    clocks, next_of = [0.0] * len(rows), [0] * len(rows)
    while len(ends) < len(actions):
        before, reasons = len(ends), list[str]()
        for rank, row in enumerate(rows):
            for cell in row[next_of[rank] :]:
                if missing := _missing(cell, last, ends):
                    text = order[rank][next_of[rank]]
                    reasons.append(
                        f"row {rank + 1}: {text} waits for {' and '.join(map(str, missing))}"
                    )
                    break
                for action in cell:
                    start = max(
                        [clocks[rank], *(ends[key] for key in _waits_for(action, last, ends))]
                    )
                    clocks[rank] = ends[action] = start + cost[action.kind]
                next_of[rank] += 1
        if len(ends) == before:
            raise ValueError(f"the actions wait for each other forever: {'; '.join(reasons)}")
    return 1 - sum(cost[action.kind] for action in actions) / (len(rows) * max(clocks))


def _missing(cell: Sequence[Action], last: int, ends: Mapping[Action, float]) -> list[Action]:
    """Return the actions that a cell still waits for: torch starts it when all its actions have
    their inputs.
    """
    missing = list[Action]()
    for number, action in enumerate(cell):
        own = [key for key in cell[:number] if key.stage == action.stage]
        missing += [
            key for key in _waits_for(action, last, ends) if key not in ends and key not in own
        ]
    return missing


def _waits_for(action: Action, last: int, ends: Mapping[Action, float]) -> list[Action]:
    """Return the actions that must end before an action starts: gradients come from a B or an I."""
    stage, kind, number = action
    if kind == "F":
        return [Action(stage - 1, "F", number)] if stage else []
    if kind == "W":
        return [Action(stage, "I", number)]
    above = [Action(stage + 1, "I" if Action(stage + 1, "I", number) in ends else "B", number)]
    return [Action(stage, "F", number), *(above if stage < last else [])]


def most_kept(row: Sequence[str]) -> int:
    """Return the largest number of forward passes that a rank holds activations of at one time."""
    change = {"F": 1, "B": -1, "I": 0, "W": -1}
    return max(accumulate(change[action.kind] for cell in row for action in parse(cell)))


def headline(stages: Stages, order: Order) -> str:
    """Return one line: schedule, stages, micro-batches and bubble."""
    name, many = stages.schedule or "the order of the CSV", "s" * (stages.size > 1)
    counts = (
        f"{name}, {len(stages.names)} stages on {len(stages.ranks)} ranks, "
        f"{stages.micro_batches:,} micro-batches"
    )
    return (
        f"{counts} of {stages.size} sequence{many}; "
        f"ranks wait {bubble(order, COST):.1%} of a step, by estimate"
    )


def describe(stages: Stages, order: Order) -> str:
    """Return the modules of every stage, and every rank's actions in a step."""
    rows = [(f"{rank}", f"{most_kept(row)}", " ".join(row)) for rank, row in enumerate(order)]
    actions = format_table(rows, ("rank", "kept", "actions"))
    return "\n\n".join(
        (f"pipeline: {headline(stages, order)}", stage_table(stages), actions, _LEGEND)
    )


def stage_table(stages: Stages) -> str:
    """Return the pipeline rank and the modules of every stage."""
    rows = [
        (f"{stage}", f"{stages.rank_of[stage]}", _shortened(names))
        for stage, names in enumerate(stages.names)
    ]
    return format_table(rows, ("stage", "rank", "modules"))


_LEGEND = """\
2F0: forward pass of stage 2 and micro-batch 0; B: backward pass; I and W: its two halves.
kept: of how many such forward passes a rank keeps the activations at once, at most. \
The estimate is for stages that
cost the same, a backward pass that costs two forward passes, and sends that cost nothing."""


def _shortened(names: Sequence[str]) -> str:
    """Return the names, of several blocks the first and the last."""
    blocks = [name for name in names if name.rpartition(".")[2].isdecimal()]
    inner = ", ".join(blocks[1:-1])
    return ", ".join(names).replace(f", {inner},", " …") if inner else ", ".join(names)
