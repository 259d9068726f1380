"""The table: which combinations are proved, each equal to one process on the whole batch. No torch.

A row takes one choice of every column. `pairwise` is a small set in which every two choices that can meet do meet;
`full` is every layout with every recomputation, accumulation and variant, the other columns going round in a way
that every two choices meet there too.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from itertools import combinations, product

from titanlite.layout import Layout

SAMPLES = 36
"""Of the whole batch: divisible by every data-parallel degree times every accumulation."""

LAYOUTS = {
    "1": Layout(),
    "dp2": Layout(dp_shard=2),
    "dp3": Layout(dp_shard=3),
    "dp4": Layout(dp_shard=4),
    "hsdp2x2": Layout(dp_replicate=2, dp_shard=2),
    "replicate4": Layout(dp_replicate=4),
    "tp2": Layout(tp=2),
    "dp2 x tp2": Layout(dp_shard=2, tp=2),
    "hsdp2x2 x tp2": Layout(dp_replicate=2, dp_shard=2, tp=2),
}
VARIANTS = ("plain", "tied", "untied", "frozen")

_AC, _FSDP, _TRAINING = "--activation_checkpoint.", "--parallelism.fsdp_", "--training."
_MIXED = [_TRAINING + "mixed_precision_param=", _TRAINING + "mixed_precision_reduce="]
WORDS: dict[str, dict[str, list[str]]] = {
    "recompute": {
        "none": [],
        "full": [_AC + "mode=full"],
        "op": [_AC + "mode=selective", _AC + "selective_ac_option=op"],
        "2nd": [_AC + "mode=selective", _AC + "selective_ac_option=2"],
    },
    "compile": {
        "off": [],
        "aot_eager": ["--compile.enable", "--compile.backend=aot_eager"],
        "inductor": ["--compile.enable", "--compile.backend=inductor"],
    },
    "accumulation": {"1": [], "3": []},
    "chunks": {"1": [], "3": [_TRAINING + "loss_chunks=3"]},
    "prefetch": {
        depth: [f"{_FSDP}forward_prefetch={depth}", f"{_FSDP}backward_prefetch={depth}"] for depth in ("0", "1", "2")
    },
    "reshard": {policy: [f"{_FSDP}reshard_after_forward={policy}"] for policy in ("default", "always", "never")},
    "precision": {
        "float64": [_TRAINING + "dtype=float64", *(key + "float64" for key in _MIXED)],
        "float32": [key + "float32" for key in _MIXED],
        "bfloat16": [_MIXED[0] + "bfloat16", _MIXED[1] + "float32"],
        "pure bf16": [_TRAINING + "dtype=bfloat16", _MIXED[0] + "bfloat16", _MIXED[1] + "float32"],
    },
}
"""What each choice adds to the command line; those of layouts and variants depend on more."""


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
    variant: str = "plain"
    precision: str = "float64"

    @property
    def mesh(self) -> Layout:
        return LAYOUTS[self.layout]

    def words(self) -> list[str]:
        """The overrides that make a job of this row, but for its variant of the model."""
        mesh = self.mesh
        return [
            f"--parallelism.data_parallel_replicate_degree={mesh.dp_replicate}",
            f"--parallelism.tensor_parallel_degree={mesh.tp}",
            f"--training.local_batch_size={SAMPLES // mesh.batch // int(self.accumulation)}",
            *(word for column, choices in WORDS.items() for word in choices[getattr(self, column)]),
        ]

    def __str__(self) -> str:
        return ", ".join(f"{f.name} {getattr(self, f.name)}" for f in fields(self))


COLUMNS = tuple(field.name for field in fields(Row))
INDUCTOR = (
    Row("dp2", "op", "inductor", precision="float32"),
    Row("dp2 x tp2", "full", "inductor", "3", precision="float32"),
)
"""Compiled for real, in processes of their own. Not in float64: torch 2.11's inductor then mistakes the type of what
attention keeps for its backward pass (2.13's does not)."""

Choices = Mapping[str, Sequence[str]]
_Pair = frozenset[tuple[str, str]]
EXCLUDED_PAIR: _Pair = frozenset({("layout", "hsdp2x2 x tp2"), ("compile", "aot_eager")})
"""What has one row in `full`, and none in the small set: eight processes that compile take a minute on two cores."""


def choices(layouts: Sequence[str], variants: Sequence[str]) -> Choices:
    """Every column's choices, for the layouts and variants that a model allows."""
    found = {"layout": layouts, "variant": variants} | {column: list(words) for column, words in WORDS.items()}
    found["compile"] = ["off", "aot_eager"]
    return {column: found[column] for column in COLUMNS}


def meets(row: Mapping[str, str]) -> bool:
    """Whether these choices can stand in one row: where nothing is sharded there is nothing to gather."""
    shards = "layout" not in row or LAYOUTS[row["layout"]].dp_shard > 1
    return shards or (row.get("prefetch", "0"), row.get("reshard", "default")) == ("0", "default")


def pairs(of: Choices) -> set[_Pair]:
    """Every two choices that can meet."""
    every = ({a: left, b: right} for a, b in combinations(COLUMNS, 2) for left, right in product(of[a], of[b]))
    return {frozenset(pair.items()) for pair in every if meets(pair)}


def pairs_in(row: Row) -> set[_Pair]:
    items = zip(COLUMNS, astuple(row), strict=True)
    return {frozenset(pair) for pair in combinations(items, 2)}


def pairwise(of: Choices) -> list[Row]:
    """A small set of rows in which all pairs meet; the same one every time, in the order of the layouts."""
    covers = (_cover(of, pairs(of) - {EXCLUDED_PAIR}, random.Random(seed), prefer_cheap=True) for seed in range(30))
    return sorted(min(covers, key=len), key=lambda row: (list(LAYOUTS).index(row.layout), astuple(row)))


def full(of: Choices) -> list[Row]:
    """The product of the columns that change most of the mathematics; in the others all pairs meet."""
    left, dice = pairs(of), random.Random(0)
    varied = ("layout", "recompute", "accumulation", "variant")
    rows = []
    for values in product(*(of[column] for column in varied)):
        rows.append(_completed(dict(zip(varied, values, strict=True)), of, left, dice))
        left -= pairs_in(rows[-1])
    return rows + _cover(of, left, dice)


def _cover(of: Choices, left: set[_Pair], dice: random.Random, *, prefer_cheap: bool = False) -> list[Row]:
    """One row after another: two choices that have not met yet, then whatever meets most."""
    rows = []
    while left:
        rows.append(_completed(dict(min(left, key=sorted)), of, left, dice, prefer_cheap=prefer_cheap))
        left -= pairs_in(rows[-1])
    return rows


def _completed(
    begun: dict[str, str], of: Choices, left: set[_Pair], dice: random.Random, *, prefer_cheap: bool = False
) -> Row:
    """Every other column gets what meets most, but makes no excluded pair; of equals a random one or, if
    prefer_cheap, what takes no time."""
    for column in sorted(COLUMNS, key=lambda _: dice.random()):
        if column in begun:
            continue
        made = {c: {frozenset(((column, c), other)) for other in begun.items()} for c in of[column]}
        fits = [c for c in of[column] if meets({**begun, column: c}) and EXCLUDED_PAIR not in made[c]]
        most = max(len(made[c] & left) for c in fits)
        best = [c for c in fits if len(made[c] & left) == most]
        begun[column] = best[0] if prefer_cheap and column in ("compile", "accumulation") else dice.choice(best)
    return Row(**begun)
