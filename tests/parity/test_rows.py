"""Sampled rows of the table; `titanlite verify` runs all of them."""

from __future__ import annotations

import pytest

from titanlite.verify.model_under_test import read_model
from titanlite.verify.runner import row_runner
from titanlite.verify.table import LAYOUTS, Row, choices, pairwise

SAMPLES = {  # model: layouts; every layout occurs, and tensor parallel in both models that have it
    "llama3": ["1", "dp3", "hsdp2x2", "tp2"],
    "gpt2": ["dp2", "dp4", "replicate4", "dp2 x tp2"],
    "parrot": ["dp2", "hsdp2x2"],
    "scaled": ["tp2"],  # has replicated parameters by its table, and norms inside of attention
}
LONG = {("gpt2", "dp4"), ("gpt2", "replicate4"), ("parrot", "hsdp2x2"), ("llama3", "1"), ("gpt2", "dp2")}
ONLY_BY_COMMAND = {"hsdp2x2 x tp2"}
"""Eight processes take half a minute on two cores."""


def argv_of(name: str) -> list[str]:
    return [f"--model.name={name}", f"--model.package={name if name in ('parrot', 'scaled') else ''}"]


def sampled_row(name: str, layout: str) -> Row:
    """Return one row of a layout, each with other recomputation; only the command runs compiled ones."""
    model = read_model(argv_of(name), {})
    rows = pairwise(choices(model.layouts, list(model.variants)))
    rows = [row for row in rows if row.compile == "off" and row.layout == layout]
    return rows[SAMPLES[name].index(layout) % len(rows)]


def test_every_layout_is_sampled():
    assert {layout for layouts in SAMPLES.values() for layout in layouts} | ONLY_BY_COMMAND == LAYOUTS.keys()


@pytest.fixture(scope="module")
def runners(pool):
    """Runners by model, each with its references, on one pool."""
    open_runners = {name: row_runner(read_model(argv_of(name), {}), pool) for name in SAMPLES}
    yield {name: runner.__enter__() for name, runner in open_runners.items()}
    for runner in open_runners.values():
        runner.__exit__(None, None, None)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=pytest.mark.long if (name, layout) in LONG else ())
        for layout in LAYOUTS  # rows on as many ranks share their process groups
        for name in SAMPLES
        if layout in SAMPLES[name]
    ],
)
def test_training_equals_the_plain_module_in_one_process(runners, name, layout):
    row = sampled_row(name, layout)
    result = runners[name](row)
    assert result.passed, f"{row}: {result.what} {result.error:.1e} on rank {result.rank}"
