"""A model in a user's own package trains without an edit in the checkout."""

import os
import subprocess
import sys
from pathlib import Path

import torch

from tests import jobs
from tests.jobs import OUTSIDE, PARROT, run_to_end
from titanlite.parallel.build import build_model

ROOT = Path(__file__).parents[2]


def test_package_registers_its_model_and_trains(pool, tmp_path):
    one, two = (pool.run(run_to_end, PARROT, str(tmp_path / str(n)), world=n) for n in (1, 2))
    assert one[0]["step"] == two[1]["step"] == 3
    assert any("parrot small" in line for line in one[0]["start"])


def test_entry_point_registers_a_model(tmp_path):
    """An entry point is a dist-info folder that names the module, as pip writes it."""
    info = tmp_path / "parrot-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: parrot\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[titanlite.models]\nparrot = parrot\n")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), OUTSIDE, str(ROOT)])}
    argv = ["config", "--model.name", "parrot", "--model.flavor", "small"]
    done = subprocess.run(
        [sys.executable, "-m", "titanlite", *argv], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert 'name = "parrot"' in done.stdout


def test_parameter_outside_the_table_is_an_error(monkeypatch):
    import parrot.model
    import pytest

    from titanlite.errors import UserError

    class Extra(parrot.model.Parrot):
        def __init__(self, *args):
            super().__init__(*args)
            self.extra = torch.nn.Parameter(torch.zeros(3))

    monkeypatch.setattr(parrot.model, "Parrot", Extra)
    with pytest.raises(UserError, match="extra matches no row"):
        build_model(jobs.job(PARROT, 1))
