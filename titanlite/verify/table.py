"""The table: which combinations of table.toml are compared with one process on the whole batch.
Imports no torch.

A row has one choice for every column. `pairwise` returns a small set of rows that has every valid
pair of choices; `beyond` returns a few rows per further layout, which cover every choice of every
other column; `full` returns every layout with every recomputation, accumulation and variant, and
every valid pair of choices in the other columns."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from itertools import combinations, product
from pathlib import Path
from typing import get_args

from titanlite.config.layout import Layout
from titanlite.config.stages import SINGLE, SPLIT_BACKWARD, V_SHAPED, Schedule
from titanlite.config.toml import read_toml

SAMPLES = 36
"""Samples of the global batch: divisible by every data-parallel degree times every accumulation."""
ROWS_OF_MICRO_BATCH = 3
"""Samples of a pipeline's micro-batch: divides a rank's samples, whatever the accumulation."""

STEPS = {"SGD": 1, "AdamW": 3, "Muon": 1}
"""Steps of each optimizer, one optimizer after the other; Muon and a user's optimizer only in
float64, where the error is a proof: an algorithm may amplify the rounding of another precision."""

_TABLE = read_toml(Path(__file__).with_suffix(".toml"))


def _layouts(kind: str) -> dict[str, Layout]:
    return {name: Layout(**degrees) for name, degrees in _TABLE["layouts"][kind].items()}


LAYOUTS = _layouts("main")
BEYOND = _layouts("beyond")
ONLY_FULL = _layouts("only_full")
ALL_LAYOUTS = LAYOUTS | BEYOND | ONLY_FULL
OVERRIDES: dict[str, dict[str, str]] = _TABLE["overrides"]
for _name in get_args(Schedule):
    OVERRIDES["schedule"].setdefault(_name, f"--parallelism.pipeline_parallel_schedule={_name}")
EXTRAS: dict[str, str] = _TABLE["extras"]
SPLIT_BY = {"sequence": "cp", "schedule": "pp"}
"""Columns that stay at their first choice if a layout does not have this dimension."""


@dataclass(frozen=True)
class Row:
    """One choice of every column."""

    layout: str
    recompute: str = "none"
    compile: str = "off"
    accumulation: str = "1"
    chunks: str = "1"
    prefetch: str = "0"
    reshard: str = "default"
    sequence: str = "headtail"
    schedule: str = "1F1B"
    documents: str = "off"
    variant: str = "plain"
    precision: str = "float64"
    extra: str = ""

    @property
    def mesh(self) -> Layout:
        return ALL_LAYOUTS[self.layout]

    @property
    def is_narrow(self) -> bool:
        """Return whether the model computes in bfloat16."""
        return self.precision in ("bfloat16", "pure bf16")

    @property
    def batch(self) -> str:
        """Return the choice that changes the batch, or something else of the reference."""
        if self.documents == "on":
            return "documents"
        if self.extra in ("one slice", "large", "imported"):
            return self.extra
        return ""

    def overrides(self) -> list[str]:
        """Return the command-line overrides for this row, without those of its variant."""
        mesh = self.mesh
        flags = [EXTRAS[self.extra]]
        if mesh.pp > 1:
            flags.append(f"--parallelism.pipeline_parallel_microbatch_size={ROWS_OF_MICRO_BATCH}")
        flags += [of_choice[getattr(self, column)] for column, of_choice in OVERRIDES.items()]
        return f"""
            --parallelism.data_parallel_replicate_degree={mesh.dp_replicate}
            --parallelism.pipeline_parallel_degree={mesh.pp}
            --parallelism.context_parallel_degree={mesh.cp}
            --parallelism.tensor_parallel_degree={mesh.tp}
            --parallelism.expert_parallel_degree={mesh.ep}
            --training.local_batch_size={SAMPLES // mesh.data_parallel // int(self.accumulation)}
            {" ".join(flags)}""".split()

    def __str__(self) -> str:
        chosen = [f"{column} {getattr(self, column)}" for column in COLUMNS]
        if self.extra:
            chosen.append(self.extra)
        return ", ".join(chosen)


COLUMNS = tuple(field.name for field in fields(Row) if field.name != "extra")


def _rows(kind: str) -> tuple[Row, ...]:
    return tuple(Row(**row) for row in _TABLE["rows"][kind])


INDUCTOR = _rows("inductor")
EXTRA = _rows("extra")
OF_DEVICE = _rows("device")

Choices = Mapping[str, Sequence[str]]
"""Values to choose from, by column."""
_Pair = frozenset[tuple[str, str]]
EXCLUDED: set[_Pair] = {
    frozenset({("layout", layout), ("compile", "aot_eager")})
    for layout in (
        "dp3",
        "dp4",
        "replicate4",
        "hsdp2x2 x tp2",
        "pp4",
        "ep2 of dp4",
        "replicate2 x ep2",
    )
}
"""Pairs with rows in `full` only: compiling takes seconds per rank, and proves no more there than
on fewer ranks.
"""


def choices(
    layouts: Sequence[str],
    variants: Sequence[str],
    documents: Sequence[str] = ("off", "on"),
    **split: Sequence[str],
) -> Choices:
    """Return the choices of every column, given the layouts, variants, documents and columns of
    SPLIT_BY that a model allows.
    """
    by_column: dict[str, Sequence[str]] = {}
    for column, flags in OVERRIDES.items():
        by_column[column] = [*flags]
    for column in SPLIT_BY:
        by_column[column] = [next(iter(OVERRIDES[column]))]
    by_column["compile"] = ["off", "aot_eager"]
    by_column |= {"layout": layouts, "variant": variants, "documents": documents, **split}
    if "cp4" in layouts:  # its ranks have two tokens, too few for three chunks
        by_column["chunks"] = ["1"]
    return {column: by_column[column] for column in COLUMNS}


def is_valid(row: Mapping[str, str]) -> bool:
    """Return whether these choices may occur in one row: gather keys have no effect without
    sharding, nor do sequence and schedule keys without context or pipeline parallel."""
    if "layout" not in row:
        return True
    if row.get("prefetch", "0") != "0":
        row = {"reshard": "always", **row}  # the only choice left with stages
    chosen = Row(**row)
    layout = chosen.mesh
    if layout.cp == 1 and chosen.sequence != "headtail":
        return False
    if layout.fsdp == 1 and (chosen.prefetch != "0" or chosen.reshard != "default"):
        return False
    if layout.pp == 1:
        return chosen.schedule == "1F1B"
    return _is_valid_in_stages(chosen)


def _is_valid_in_stages(row: Row) -> bool:
    """Return whether the config allows these choices with stages: only schedules with one stage per
    rank gather parameters more than once, or ahead; a backward pass in two halves excludes compiled
    or recomputed blocks; a V's weights are not tied."""
    again = row.reshard == "always"
    if again and row.schedule not in SINGLE:
        return False
    if row.prefetch != "0" and not again:
        return False
    if row.schedule in SPLIT_BACKWARD and (row.compile != "off" or row.recompute != "none"):
        return False
    return row.schedule not in V_SHAPED or row.variant != "tied"


def pairs(of: Choices) -> set[_Pair]:
    """Return every valid pair of choices."""
    found = set[_Pair]()
    for one, other in combinations(COLUMNS, 2):
        for left, right in product(of[one], of[other]):
            pair = {one: left, other: right}
            if is_valid(_given(of) | pair):
                found.add(frozenset(pair.items()))
    return found


def _given(of: Choices) -> dict[str, str]:
    """Return the layout of all rows, if there is only one."""
    if len(of["layout"]) == 1:
        return {"layout": of["layout"][0]}
    return {}


def pairs_in(row: Row) -> set[_Pair]:
    found = set[_Pair]()
    for pair in combinations(zip(COLUMNS, astuple(row), strict=False), 2):
        found.add(frozenset(pair))
    return found


def pairwise(of: Choices) -> list[Row]:
    """Return a small set of rows that contains every valid pair, always the same.

    They are in the order of the layouts, those with tensor parallel first, since these reveal
    mistakes in a model's table."""
    covers = []
    for seed in range(30):
        covers.append(_cover(of, pairs(of) - EXCLUDED, random.Random(seed), prefer_cheap=True))
    order = sorted(LAYOUTS, key=lambda layout: LAYOUTS[layout].tp == 1)

    def cost(rows: list[Row]) -> int:
        total = 0
        for row in rows:
            total += row.mesh.world
            if row.compile != "off":  # a rank that compiles takes about three times as long
                total += 2 * row.mesh.world
        return total

    return sorted(min(covers, key=cost), key=lambda row: (order.index(row.layout), astuple(row)))


def beyond(of: Choices) -> list[Row]:
    """Return a small set of rows with a layout and every choice of every other column, always the
    same.

    The first is in float64 with the default split of sequences, if the model allows that.
    """
    (layout,) = of["layout"]
    met = {pair for pair in pairs(of) - EXCLUDED if ("layout", layout) in pair}
    covers = []
    for seed in range(30):
        covers.append(_cover(of, set(met), random.Random(f"{layout} {seed}"), prefer_cheap=True))

    def order(row: Row) -> tuple[bool, ...]:
        return (
            row.precision != "float64",
            row.sequence != "headtail",
            row.compile != "off",
            row.accumulation != "1",
        )

    return sorted(min(covers, key=lambda rows: (len(rows), min(map(order, rows)))), key=order)


def full(of: Choices) -> list[Row]:
    """Return the product of the columns that change the mathematics most, with every valid pair of
    the other columns.
    """
    uncovered = pairs(of)
    rng = random.Random(0)
    varied = ("layout", "recompute", "accumulation", "variant")
    values = product(*(of[column] for column in varied))
    rows = []
    for choice in values:
        rows.append(_complete(dict(zip(varied, choice, strict=True)), of, uncovered, rng))
    return rows + _cover(of, uncovered, rng)


def _cover(
    of: Choices, uncovered: set[_Pair], rng: random.Random, *, prefer_cheap: bool = False
) -> list[Row]:
    """Return rows that cover every pair: each starts from an uncovered pair and is completed
    greedily.
    """
    rows = []
    while uncovered:
        row = _given(of) | dict(min(uncovered, key=sorted))
        rows.append(_complete(row, of, uncovered, rng, prefer_cheap=prefer_cheap))
    return rows


def _complete(
    row: dict[str, str],
    of: Choices,
    uncovered: set[_Pair],
    rng: random.Random,
    *,
    prefer_cheap: bool = False,
) -> Row:
    """Give each missing column the choice that covers most pairs, avoiding excluded pairs if
    possible.

    Among equally good choices take a random one or, with prefer_cheap, the one that runs fastest.
    Remove the row's pairs from `uncovered`."""
    for column in sorted(COLUMNS, key=lambda _: rng.random()):
        if column in row:
            continue
        made = {}
        for c in of[column]:
            made[c] = {frozenset(((column, c), other)) for other in row.items()}
        valid = [c for c in of[column] if is_valid({**row, column: c})]
        valid = [c for c in valid if not EXCLUDED & made[c]] or valid
        most = max(len(made[c] & uncovered) for c in valid)
        best = [c for c in valid if len(made[c] & uncovered) == most]
        if prefer_cheap and column in ("compile", "accumulation"):
            row[column] = best[0]
        else:
            row[column] = rng.choice(best)
    uncovered -= pairs_in(Row(**row))
    return Row(**row)
