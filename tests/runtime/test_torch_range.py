"""pyproject.toml has the one range of torch versions: an older torch is refused, a newer one
warns.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from titanlite.errors import UserError
from titanlite.runtime import cluster

ENVIRONMENT = Path(__file__).resolve().parents[2] / "scripts" / "environment.py"


def check(monkeypatch: pytest.MonkeyPatch, installed: str) -> None:
    monkeypatch.setattr(cluster, "version", lambda _: installed)
    monkeypatch.setattr(cluster, "requires", lambda _: ["torchdata>=0.11", "torch<2.16,>=2.11"])
    cluster.check_torch()


@pytest.mark.parametrize("installed", ["2.10.1", "1.13.1+cu117"])
def test_an_older_torch_is_refused(monkeypatch, installed):
    with pytest.raises(
        UserError, match=f"torch {re.escape(installed)} is too old: titanlite needs torch<2.16"
    ):
        check(monkeypatch, installed)


@pytest.mark.parametrize("installed", ["2.16.0a0+git12", "3.0.0"])
def test_a_newer_torch_warns_in_one_line(monkeypatch, capsys, installed):
    check(monkeypatch, installed)
    warning = capsys.readouterr().err
    assert (
        f"torch {installed} is newer than any that was tested" in warning
        and warning.count("\n") == 1
    )


@pytest.mark.parametrize("installed", ["2.11.0", "2.13.0+cpu", "2.15.0"])
def test_a_torch_in_the_range_is_silent(monkeypatch, capsys, installed):
    check(monkeypatch, installed)
    assert capsys.readouterr().err == ""


def test_the_environment_script_reads_the_range_from_pyproject():
    spec = importlib.util.spec_from_file_location("environment", ENVIRONMENT)
    assert spec and spec.loader
    environment = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(environment)
    low, high = environment.torch_range()
    assert (2, 11) <= low < high
