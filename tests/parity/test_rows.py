"""Sampled rows of the table; `titanlite verify` runs all of them."""

from __future__ import annotations

from functools import cache

import pytest

from tests.lanes import sample
from titanlite.verify.command import table
from titanlite.verify.measurements import BOUNDS
from titanlite.verify.model_under_test import read_model
from titanlite.verify.runner import row_runner
from titanlite.verify.table import ALL_LAYOUTS, EXTRA, LAYOUTS, ONLY_FULL, Row

SAMPLES = {  # model: layouts, each with a precision
    "llama3": {
        "1": "pure bf16",
        "dp3": "float32",
        "hsdp2x2": "bfloat16",
        "tp2": "float64",
        "cp2": "float64",
    }
    | {"cp2 x tp2": "float64", "replicate2 x cp2": "float32"},
    "gpt2": {
        "dp2": "pure bf16",
        "dp4": "bfloat16",
        "replicate4": "bfloat16",
        "dp2 x tp2": "bfloat16",
    }
    | {"cp2": "float32", "dp2 x cp2": "float64"},
    "parrot": {"dp2": "float32", "hsdp2x2": "float64"},
    "scaled": {
        "dp2 x tp2": "pure bf16"
    },  # has replicated parameters by its table, and norms inside of attention
    "qwen3": {"dp2 x tp2": "pure bf16", "tp2": "float64"},  # has both, too
    "experts": {
        "ep2": "float64",
        "ep2 of dp4": "float64",
        "replicate2 x ep2": "float32",
        "ep2 of tp2": "bfloat16",
    },
}
LONG = {
    ("gpt2", "dp4"),
    ("gpt2", "replicate4"),
    ("parrot", "hsdp2x2"),
    ("llama3", "1"),
    ("gpt2", "dp2"),
}
LONG |= {("gpt2", "dp2 x tp2"), ("parrot", "dp2"), ("scaled", "dp2 x tp2"), ("qwen3", "tp2")}
LONG |= {("experts", layout) for layout in ("ep2 of dp4", "replicate2 x ep2", "ep2 of tp2")}
LONG |= {
    ("llama3", "cp2 x tp2"),
    ("llama3", "replicate2 x cp2"),
    ("gpt2", "cp2"),
    ("gpt2", "dp2 x cp2"),
}
SPLIT_BY_INDUCTOR = [
    Row("cp2", "op", "inductor", documents="on", precision="float32"),
    Row("cp2", "full", "inductor", "3", sequence="ulysses", precision="float32"),
]
ONLY_BY_COMMAND = {"hsdp2x2 x tp2", *ONLY_FULL}
"""Eight processes take half a minute on two cores; cp4 is in no table but --full's."""
STAGES = [
    ("gpt2", Row("pp2")),
    ("llama3", Row("pp2 x dp2", schedule="ZBVZeroBubble")),
]
"""Schedules of one stage a rank, and of a V; the first is tied."""
MORE_STAGES = [
    ("llama3", Row("pp2 x tp2", recompute="full", schedule="Interleaved1F1B")),
    ("gpt2", Row("pp4", schedule="csv", precision="bfloat16")),
    (
        "llama3",
        Row("pp2 x cp2", accumulation="3", schedule="InterleavedZeroBubble", documents="on"),
    ),
    (
        "llama3",
        Row(
            "pp2 x dp2", "op", prefetch="1", reshard="always", variant="frozen", precision="float32"
        ),
    ),
]


def argv_of(name: str) -> list[str]:
    if name == "experts":
        return ["--model.name=qwen3", "--model.flavor=debugmodel_moe"]
    return [
        f"--model.name={name}",
        f"--model.package={name if name in ('parrot', 'scaled') else ''}",
    ]


@cache
def rows_of(name: str) -> dict[int, Row]:
    return table(read_model(argv_of(name), {}))


def sampled_row(name: str, layout: str) -> Row:
    """Return the row of a layout and its precision; only the command runs compiled ones."""
    rows = rows_of(name).values()
    wanted = (layout, SAMPLES[name][layout], "off")
    return next(
        row for row in rows if not row.extra and (row.layout, row.precision, row.compile) == wanted
    )


def test_every_layout_and_precision_is_sampled_and_tensor_parallel_in_all_but_float32():
    staged = {row.layout for _, row in STAGES + MORE_STAGES}
    assert {*staged, *ONLY_BY_COMMAND}.union(*SAMPLES.values()) == ALL_LAYOUTS.keys()
    sampled = [
        (layout, precision) for layouts in SAMPLES.values() for layout, precision in layouts.items()
    ]
    assert {precision for _, precision in sampled} == BOUNDS.keys()
    assert {precision for layout, precision in sampled if "tp" in layout} == {
        "float64",
        "bfloat16",
        "pure bf16",
    }


def test_a_model_without_a_core_of_attention_has_no_rows_with_documents():
    documents = {
        name: {row.documents for row in rows_of(name).values()}
        for name in ("llama3", "parrot", "scaled")
    }
    assert documents == {"llama3": {"off", "on"}, "parrot": {"off"}, "scaled": {"off"}}


@pytest.fixture(scope="module")
def runners(pool):
    """Runners by model, each with its references, on one pool."""
    open_runners = {name: row_runner(read_model(argv_of(name), {}), pool) for name in SAMPLES}
    yield {name: runner.__enter__() for name, runner in open_runners.items()}
    for runner in open_runners.values():
        runner.__exit__(None, None, None)


CASES = [
    (name, layout)
    for layout in ALL_LAYOUTS  # rows on as many ranks share their process groups
    for name in SAMPLES
    if layout in SAMPLES[name]
]


@pytest.mark.parametrize(("name", "layout"), sample(CASES, *({*CASES} - LONG), every=4))
def test_training_equals_the_plain_module_in_one_process(runners, name, layout):
    row = sampled_row(name, layout)
    result = runners[name](row)
    assert result.passed, f"{row}: {result.what} {result.error:.1e} on rank {result.rank}"


@pytest.mark.parametrize(
    ("name", "row"),
    [*STAGES, *(pytest.param(*sample, marks=pytest.mark.long) for sample in MORE_STAGES)],
    ids=str,
)
def test_stages_equal_the_plain_module_in_one_process(runners, name, row):
    result = runners[name](row)
    assert result.passed, f"{row}: {result.what} {result.error:.1e} on rank {result.rank}"


@pytest.mark.parametrize("row", sample(SPLIT_BY_INDUCTOR, long=SPLIT_BY_INDUCTOR[1:]), ids=str)
def test_inductor_compiles_blocks_that_share_sequences(runners, row):
    result = runners["llama3"](row)
    assert result.passed, f"{row}: {result.what} {result.error:.1e} on rank {result.rank}"


@pytest.mark.parametrize("row", sample(EXTRA, every=2), ids=lambda row: row.extra)
def test_a_technique_of_a_whole_run_equals_the_plain_module(runners, row):
    result = runners["llama3" if row.layout in LAYOUTS else "experts"](row)
    assert result.passed, f"{row}: {result.what} {result.error:.1e} on rank {result.rank}"
