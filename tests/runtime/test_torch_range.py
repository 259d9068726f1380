"""pyproject.toml has the one range of torch versions: an older torch is refused, a newer one
warns.
"""

from __future__ import annotations

import importlib.util

import pytest

from tests.messages import refused
from tests.runs import ROOT
from titanlite.runtime import cluster

ENVIRONMENT = ROOT / "scripts" / "environment.py"


def check(monkeypatch: pytest.MonkeyPatch, installed: str) -> None:
    monkeypatch.setattr(cluster, "version", lambda _: installed)
    monkeypatch.setattr(cluster, "requires", lambda _: ["torchdata>=0.11", "torch<2.16,>=2.11"])
    cluster.check_torch()


@pytest.mark.parametrize("installed", ["2.10.1", "1.13.1+cu117"])
def test_an_older_torch_is_refused(monkeypatch, installed):
    with refused(f"torch {installed}", "torch<2.16"):
        check(monkeypatch, installed)


@pytest.mark.parametrize(
    ("installed", "lines"),
    [("2.11.0", 0), ("2.13.0+cpu", 0), ("2.15.0", 0), ("2.16.0a0+git12", 1), ("3.0.0", 1)],
)
def test_a_newer_torch_warns_in_one_line_and_one_in_the_range_is_silent(
    monkeypatch, capsys, installed, lines
):
    check(monkeypatch, installed)
    warning = capsys.readouterr().err
    assert warning.count("\n") == lines and warning.count(f"torch {installed}") == lines


def test_the_environment_script_reads_the_range_from_pyproject():
    spec = importlib.util.spec_from_file_location("environment", ENVIRONMENT)
    assert spec and spec.loader
    environment = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(environment)
    low, high = environment.torch_range()
    assert (2, 11) <= low < high
