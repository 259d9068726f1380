"""Packages of kernels take no tensors of a CPU: probes and plans call torch's functions."""

from __future__ import annotations

import importlib
import sys

import pytest
from transformers.integrations import hub_kernels
from transformers.models.mamba2 import modeling_mamba2

from tests.jobs import job
from tests.messages import refused
from tests.models.test_transformers import SPEC, of
from titanlite.models.transformers import as_json, kernels, probe
from titanlite.planner.rehearse import record_step

FUNCTION, PACKAGE = "causal_conv1d_fn", "causal_conv1d"
STUB = f"""
def {FUNCTION}(x, weight, bias=None, activation=None):
    raise RuntimeError("Expected x.is_cuda() to be true, but got false.")
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The package, found by transformers' own decorator, as at the import of the class."""
    (tmp_path / f"{PACKAGE}.py").write_text(STUB)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    importlib.invalidate_caches()
    plain = getattr(modeling_mamba2, FUNCTION)
    bind = hub_kernels.use_kernel_func_from_hub_with_fallback(FUNCTION, PACKAGE)
    monkeypatch.setattr(modeling_mamba2, FUNCTION, bind(plain.__wrapped__))
    probe.probe.cache_clear()
    yield
    probe.probe.cache_clear()
    sys.modules.pop(PACKAGE, None)


@pytest.mark.long
def test_a_class_is_probed_and_planned_by_torchs_functions(installed):
    given = job([*of("mamba2"), "--training.loss_chunks=2", "--compile.enable"], 1)
    assert probe.probe(as_json(given.model_config))["compiles"] == "yes"
    assert record_step(job(of("mamba2"), 1)).peak > 0


def test_answers_are_kept_apart_by_the_packages_that_are_installed(
    tmp_path, monkeypatch, installed
):
    asked = []
    monkeypatch.setattr(probe, "_answers", lambda values: asked.append(kernels.found()) or {})
    values = as_json(SPEC.configure("mamba2", {}))
    for path in (sys.path, [each for each in sys.path if each != str(tmp_path)]):
        monkeypatch.setattr(sys, "path", path)
        sys.modules.pop(PACKAGE, None)
        for _ in range(2):
            probe.probe.cache_clear()
            probe.probe(values)
    assert len(asked) == 2 and PACKAGE in asked[0] and PACKAGE not in asked[1]


def test_what_a_class_raises_in_a_rehearsal_is_named(monkeypatch):
    def fail(*args, **options):
        raise RuntimeError("Expected x.is_cuda()")

    given = job(of("mamba2"), 1)
    monkeypatch.setattr(modeling_mamba2, FUNCTION, fail)
    with refused("not planned: backbone.layers.0.mixer raises RuntimeError", "is_cuda()"):
        record_step(given)
