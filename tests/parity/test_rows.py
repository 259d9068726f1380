"""Sampled rows of the table; `titanlite verify` runs all of them."""

import pytest

from tests.jobs import OUTSIDE
from titanlite.verify.model_under_test import read_subject
from titanlite.verify.runner import proof
from titanlite.verify.table import LAYOUTS, choices, pairwise

LAYOUTS_OF = {  # every layout is somewhere, and tensor parallel in both models that have it
    "llama3": ["1", "dp3", "hsdp2x2", "tp2"],
    "gpt2": ["dp2", "dp4", "replicate4", "dp2 x tp2"],
    "parrot": ["dp2", "hsdp2x2"],
    "scaled": ["tp2"],  # parameters that stay whole by themselves, and norms inside of attention
}
FOR_THE_COMMAND = {"hsdp2x2 x tp2"}
"""Eight processes take half a minute on two cores."""


def sampled(name):
    """One row a layout, with other recomputation each; compiled ones take seconds each, and are for the command."""
    package = name if name in ("parrot", "scaled") else ""
    model = read_subject([f"--model.name={name}", f"--model.package={package}"], {})
    rows = [row for row in pairwise(choices(model.layouts, list(model.variants))) if row.compile == "off"]
    found = []
    for number, layout in enumerate(LAYOUTS_OF[name]):
        these = [row for row in rows if row.layout == layout]
        found.append(these[number % len(these)])
    return model, found


def test_every_layout_is_sampled():
    assert {layout for these in LAYOUTS_OF.values() for layout in these} | FOR_THE_COMMAND == LAYOUTS.keys()


@pytest.mark.parametrize("name", LAYOUTS_OF)
def test_training_on_every_layout_equals_the_plain_module_in_one_process(monkeypatch, name):
    monkeypatch.syspath_prepend(OUTSIDE)
    model, rows = sampled(name)
    with proof(model) as run:
        for row in rows:
            result = run(row)
            assert result.passed, f"{row}: {result.what} {result.error:.1e} on rank {result.rank}"
