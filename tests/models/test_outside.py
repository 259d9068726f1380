"""A model in a user's own package trains without an edit in the checkout."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import jobs
from tests.jobs import FLOAT64, OUTSIDE, PARROT, QUIET, relative_error, run_to_end
from titanlite.cli import main
from titanlite.config.config_json import model_of
from titanlite.errors import UserError
from titanlite.parallel.build import build_model
from titanlite.registry import expert_paths, get_model

ROOT = Path(__file__).parents[2]
MIXED = [*QUIET, "--model.package=mixed", "--model.name=mixed", "--model.flavor=small"]


def test_package_registers_its_model_and_trains(pool, tmp_path):
    one, two = (pool.run(run_to_end, PARROT, str(tmp_path / str(n)), world=n) for n in (1, 2))
    assert one[0]["step"] == two[1]["step"] == 3
    assert any("parrot small" in line for line in one[0]["start"])


def test_a_package_brings_experts_of_its_own(pool, tmp_path):
    """Its table alone tells which weights are experts'; a data-parallel run has the numbers of one
    process.
    """
    spec = get_model("mixed", "mixed")
    assert expert_paths(spec.rules(spec.flavors["small"]), spec.blocks) == ("mixture.experts",)
    argv = [*MIXED, *FLOAT64, "--training.global_batch_size=4"]
    one, two = (pool.run(run_to_end, argv, str(tmp_path / str(n)), world=n)[0] for n in (1, 2))
    assert any(
        "mixed small, " in line and " active: " in line and "experts 1,024" in line
        for line in one["start"]
    )
    assert one["weights"].keys() >= {"layers.0.dense.up.weight", "layers.1.mixture.experts.up"}
    for name, expected in one["weights"].items():
        assert relative_error(two["weights"][name], expected) < 1e-12, name


def test_entry_point_registers_a_model(tmp_path):
    """An entry point is a dist-info folder that names the module, as pip writes it."""
    _install_entry_point(tmp_path, "parrot", "parrot")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), OUTSIDE, str(ROOT)])}
    argv = ["config", "--model.name", "parrot", "--model.flavor", "small"]
    done = subprocess.run(
        [sys.executable, "-m", "titanlite", *argv],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert 'name = "parrot"' in done.stdout


def _install_entry_point(folder: Path, name: str, module: str) -> None:
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[titanlite.models]\n{name} = {module}\n")


def test_an_entry_point_that_fails_to_import_is_one_line_that_names_it(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "broken_owl.py").write_text("import nothing_of_this_name\n")
    _install_entry_point(tmp_path, "owl", "broken_owl")
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["models"]) == 0
    printed = capsys.readouterr()
    line = (
        'owl\'s entry point owl = "broken_owl" in titanlite.models fails to import: '
        "ModuleNotFoundError: "
    )
    assert (
        "llama3" in printed.out
        and printed.err.startswith(f"titanlite: {line}")
        and printed.err.count("\n") == 1
    )
    assert main(["models", "owl"]) == 2 and line in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "owl"}))
    with pytest.raises(UserError, match="no registered model has; legal: gpt2, llama"):
        model_of(tmp_path)


def test_parameter_outside_the_table_is_an_error(monkeypatch):
    import parrot.model

    class Extra(parrot.model.Parrot):
        def __init__(self, *args):
            super().__init__(*args)
            self.extra = torch.nn.Parameter(torch.zeros(3))

    monkeypatch.setattr(parrot.model, "Parrot", Extra)
    with pytest.raises(UserError, match="extra matches no row"):
        build_model(jobs.job(PARROT, 1))
