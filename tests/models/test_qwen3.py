"""Qwen 3 with experts: active parameters."""

import pytest

from titanlite.models.qwen3 import FLAVORS, SPEC, active_parameters
from titanlite.parallel.build import build_meta_model


@pytest.mark.parametrize(("flavor", "billions"), [("30B-A3B", 3.35), ("235B-A22B", 22.19)])
def test_active_parameters_are_what_the_names_say(flavor, billions):
    model, table = build_meta_model(SPEC, FLAVORS[flavor])
    active = sum(round(p.numel() * table[name].active) for name, p in model.named_parameters())
    assert active_parameters(FLAVORS[flavor]) == active and round(active / 1e9, 2) == billions
