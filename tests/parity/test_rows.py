"""Sampled rows of the table; `titanlite verify` runs all of them."""

from __future__ import annotations

from contextlib import ExitStack
from functools import cache

import pytest

from tests.lanes import sample
from titanlite.verify.command import table
from titanlite.verify.measurements import BOUNDS
from titanlite.verify.model_under_test import read_model
from titanlite.verify.runner import row_runner
from titanlite.verify.table import ALL_LAYOUTS, EXTRA, EXTRAS, LAYOUTS, ONLY_FULL, Row

SAMPLED = [  # model, layout, precision
    ("llama3", "tp2", "float64"),
    ("llama3", "cp2", "float64"),
    ("experts", "ep2", "float64"),
    ("llama3", "hsdp2x2", "bfloat16"),
]
MORE = [
    ("llama3", "1", "pure bf16"),
    ("gpt2", "dp2", "pure bf16"),
    ("gpt2", "cp2", "float32"),
    ("experts", "ep2 of tp2", "bfloat16"),
    ("llama3", "dp3", "float32"),
    ("gpt2", "dp4", "bfloat16"),
    ("gpt2", "replicate4", "bfloat16"),
    ("gpt2", "dp2 x cp2", "float64"),
    ("parrot", "hsdp2x2", "float64"),
    ("llama3", "cp2 x tp2", "float64"),
    ("llama3", "replicate2 x cp2", "float32"),
    # replicated parameters by its table, and norms inside of attention
    ("scaled", "dp2 x tp2", "pure bf16"),
    ("qwen3", "dp2 x tp2", "pure bf16"),
    ("experts", "ep2 of dp4", "float64"),
    ("experts", "replicate2 x ep2", "float32"),
]
ONLY_BY_COMMAND = {"hsdp2x2 x tp2", *ONLY_FULL}
"""Eight processes take half a minute on two cores; cp4 is in no table but --full's."""
STAGES = [
    ("gpt2", Row("pp2")),
    ("llama3", Row("pp2 x dp2", schedule="ZBVZeroBubble")),
]
"""Schedules of one stage a rank, and of a V; the first is tied."""
SINGLE = [
    *STAGES,
    ("llama3", Row("pp2 x tp2", recompute="full", schedule="Interleaved1F1B")),
    ("gpt2", Row("pp4", schedule="csv", precision="bfloat16")),
    (
        "llama3",
        Row("pp2 x cp2", accumulation="3", schedule="InterleavedZeroBubble", documents="on"),
    ),
    (
        "llama3",
        Row("cp2", "full", "inductor", "3", sequence="ulysses", precision="float32"),
    ),
    *(("llama3" if row.layout in LAYOUTS else "experts", row) for row in EXTRA),
]


@cache
def model_of(name: str):
    if name == "experts":
        return read_model(["--model.name=qwen3", "--model.flavor=debugmodel_moe"], {})
    package = name if name in ("parrot", "scaled") else ""
    return read_model([f"--model.name={name}", f"--model.package={package}"], {})


def rows_of(name: str) -> list[Row]:
    return [*table(model_of(name)).values()]


def test_every_layout_and_precision_is_sampled_and_tensor_parallel_in_all_but_float32():
    sampled = {(layout, precision) for _, layout, precision in SAMPLED + MORE}
    layouts = {layout for layout, _ in sampled} | {row.layout for _, row in SINGLE}
    assert layouts | ONLY_BY_COMMAND == ALL_LAYOUTS.keys()
    assert {row.extra for _, row in SINGLE} == EXTRAS.keys()
    assert {precision for _, precision in sampled} == BOUNDS.keys()
    of_tp = {precision for layout, precision in sampled if "tp" in layout}
    assert of_tp == BOUNDS.keys() - {"float32"}


def test_a_model_without_a_core_of_attention_has_no_rows_with_documents():
    documents = {name: {row.documents for row in rows_of(name)} for name in ("llama3", "scaled")}
    assert documents == {"llama3": {"off", "on"}, "scaled": {"off"}}


@pytest.fixture(scope="module")
def verified(pool):
    """Require that a row of a model has the numbers of the plain module in one process."""
    with ExitStack() as stack:
        runner = cache(lambda name: stack.enter_context(row_runner(model_of(name), pool)))

        def verify(name: str, row: Row) -> None:
            result = runner(name)(row)
            assert result.passed, f"{row}: {result.what} {result.error:.1e} on rank {result.rank}"

        yield verify


@pytest.mark.parametrize(("name", "layout", "precision"), sample(SAMPLED + MORE, *SAMPLED))
def test_training_equals_the_plain_module_in_one_process(verified, name, layout, precision):
    """Only the command runs compiled ones."""
    wanted = (layout, precision, "off", "")
    fitting = (
        row
        for row in rows_of(name)
        if (row.layout, row.precision, row.compile, row.extra) == wanted
    )
    verified(name, next(fitting))


@pytest.mark.parametrize(("name", "row"), sample(SINGLE, *STAGES), ids=str)
def test_a_row_equals_the_plain_module_in_one_process(verified, name, row):
    verified(name, row)
