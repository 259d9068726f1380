"""Sampled rows of the table; `titanlite verify` runs all of them."""

import pytest

from tests.jobs import OUTSIDE
from titanlite.verify.proof import proof
from titanlite.verify.subject import read_subject
from titanlite.verify.table import LAYOUTS, choices, pairwise

MODELS = {"llama3": (), "gpt2": ("--model.name=gpt2",), "parrot": ("--model.name=parrot", "--model.package=parrot")}
EIGHT = "hsdp2x2 x tp2"


def sampled(words):
    """One row a layout, with other recomputation each; compiled ones take seconds each, and are for the command."""
    model = read_subject(list(words), {})
    rows = [row for row in pairwise(choices(model.layouts, list(model.variants))) if row.compile == "off"]
    found = []
    for number, layout in enumerate(layout for layout in model.layouts if layout != EIGHT):
        these = [row for row in rows if row.layout == layout]
        found.append(these[number % len(these)])
    return model, found


@pytest.mark.parametrize("name", MODELS)
def test_training_on_every_layout_equals_the_plain_module_in_one_process(monkeypatch, name):
    monkeypatch.syspath_prepend(OUTSIDE)
    model, rows = sampled(MODELS[name])
    with proof(model) as run:
        for row in rows:
            result = run(row)
            assert result.passed, f"{row}: {result.what} {result.error:.1e} on rank {result.rank}"


def test_eight_processes_equal_one():
    model = read_subject([], {})
    row = next(
        row for row in pairwise(choices(model.layouts, ["plain"])) if row.layout == EIGHT and row.compile == "off"
    )
    assert LAYOUTS[EIGHT].world == 8
    with proof(model) as run:
        result = run(row)
    assert result.passed, result
