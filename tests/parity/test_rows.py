"""Sampled rows of the table; `titanlite verify` runs all of them, those of Llama 3 every night."""

from __future__ import annotations

from contextlib import ExitStack
from functools import cache

import pytest

from tests.lanes import sample
from titanlite.verify.command import table
from titanlite.verify.model_under_test import read_model
from titanlite.verify.runner import row_runner
from titanlite.verify.table import EXTRA, Row

LONG = [  # model, layout, precision
    ("llama3", "tp2", "float64"),
    ("gpt2", "cp2", "float32"),
    ("llama3", "cp2", "float64"),
    ("parrot", "hsdp2x2", "float64"),
]
NIGHTLY = [
    ("experts", "ep2", "float64"),
    # replicated parameters by its table, and norms inside of attention
    ("scaled", "dp2 x tp2", "pure bf16"),
    ("qwen3", "tp2", "float64"),
    ("gpt2", "dp2 x cp2", "float64"),
    ("llama3", "1", "pure bf16"),
    ("gpt2", "dp2", "pure bf16"),
    ("experts", "ep2 of tp2", "bfloat16"),
    ("llama3", "dp3", "float32"),
    ("llama3", "hsdp2x2", "bfloat16"),
]
ONLY_HERE = {"one slice": "llama3", "large": "llama3", "imported": "experts"}
"""What no row of tests/parallel has, with its model."""
SINGLE = [
    ("gpt2", Row("pp2")),
    ("llama3", Row("pp2 x dp2", schedule="ZBVZeroBubble")),
    ("gpt2", Row("pp4", schedule="GPipe", precision="bfloat16")),
    *((ONLY_HERE[row.extra], row) for row in EXTRA if row.extra in ONLY_HERE),
]
INDUCTOR = Row("cp2", "full", "inductor", "3", sequence="ulysses", precision="float32")


@cache
def model_of(name: str):
    if name == "experts":
        return read_model(["--model.name=qwen3", "--model.flavor=debugmodel_moe"], {})
    package = name if name in ("parrot", "scaled") else ""
    return read_model([f"--model.name={name}", f"--model.package={package}"], {})


def rows_of(name: str) -> list[Row]:
    return [*table(model_of(name)).values()]


@pytest.mark.long
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


@pytest.mark.parametrize(
    ("name", "layout", "precision"),
    sample(LONG + NIGHTLY, nightly=NIGHTLY),
)
def test_training_equals_the_plain_module_in_one_process(verified, name, layout, precision):
    """Only the command runs compiled ones."""
    wanted = (layout, precision, "off", "")
    fitting = (
        row
        for row in rows_of(name)
        if (row.layout, row.precision, row.compile, row.extra) == wanted
    )
    verified(name, next(fitting))


@pytest.mark.parametrize(
    ("name", "row"),
    [*sample(SINGLE), pytest.param("llama3", INDUCTOR, marks=pytest.mark.nightly)],
    ids=str,
)
def test_a_row_equals_the_plain_module_in_one_process(verified, name, row):
    verified(name, row)
