"""A model with rows that nothing splits has the numbers of one process on every layout, or the
layout is refused.
"""

from __future__ import annotations

import pytest

from tests.lanes import sample
from tests.messages import says
from titanlite.cli import main
from titanlite.verify.model_under_test import read_model
from titanlite.verify.runner import row_runner
from titanlite.verify.table import Row

BARE = """
from dataclasses import replace
from titanlite.models.llama3 import SPEC
from titanlite.registry import Rule, ones, register_model

def rules(model):
    return [*SPEC.rules(model), Rule("layers.*.scale", ones, "norm")]

register_model(replace(SPEC, name="bare", rules=rules, hf=None))
"""
ALL, ATTENTION = ["*"], ["layers.*.attention*"]


def argv_of(name: str, whole: list[str]) -> list[str]:
    return ["--model.package=unsplit", f"--model.name={name}", f"--model.overrides.whole={whole}"]


@pytest.mark.parametrize(
    ("name", "whole", "degree", "why"),
    [
        ("unsplit", ALL, "tensor", '"embedding"'),
        ("unsplit_gpt2", ["output*"], "tensor", ""),  # tied: the embedding is the head
        ("unsplit", ["output*"], "tensor", '"head"'),
        ("unsplit_gpt2", ATTENTION, "tensor", 'layers.0.attention has the role "column"'),
        # The table names no block by its number.
        ("unsplit_gpt2", ["layers.2.*"], "tensor", ""),
        ("unsplit_moe", ["*experts*"], "tensor", ""),
        ("unsplit_moe", ["*experts*"], "expert", "no experts"),
        ("unsplit_moe", ["tok*"], "expert", ""),
        ("unsplit_moe", ALL, "context", ""),
        ("unsplit_moe", ALL, "pipeline", ""),
    ],
)
def test_a_degree_that_would_split_nothing_is_refused_by_name(capsys, name, whole, degree, why):
    flavor = ["--model.flavor=small", f"--parallelism.{degree}_parallel_degree=2"]
    argv = ["config", "--world", "2", "--training.local_batch_size=4"]
    code = main([*argv, *argv_of(name, whole), *flavor])
    printed = capsys.readouterr().err
    assert code == (2 if why else 0), printed
    if why:
        says(printed, name, why, "legal: 1", f"{degree}_parallel_degree")


def test_a_parameter_without_a_module_of_its_own_is_not_split(tmp_path, monkeypatch, capsys):
    """torch splits modules, by the weight that each has."""
    (tmp_path / "bare.py").write_text(BARE)
    monkeypatch.syspath_prepend(tmp_path)
    argv = ["config", "--world=2", "--training.local_batch_size=4", "--model.package=bare"]
    argv += ["--model.name=bare", "--model.flavor=debugmodel"]
    assert main([*argv, "--parallelism.tensor_parallel_degree=2"]) == 2
    says(capsys.readouterr().err, "layers.*.scale", '"norm"')
    assert main(argv) == 0


UNSPLIT = [
    ("unsplit", ["layers.*.feed_forward.*", "*norm*"], ["tp2"]),
    ("unsplit_moe", ALL, ["dp2", "pp2"]),
    ("unsplit_moe", ["tok*", "output*", "*attention*"], ["cp2", "ep2"]),
]


@pytest.mark.parametrize(("name", "whole", "layouts"), sample(UNSPLIT, nightly=UNSPLIT[1:]))
def test_rows_that_nothing_splits_have_the_gradients_of_one_process(pool, name, whole, layouts):
    model = read_model(argv_of(name, whole), {})
    with row_runner(model, pool) as run:
        for layout in layouts:
            result = run(Row(layout, precision="float64"))
            assert result.passed, (
                f"{layout}: {result.what} {result.error:.1e} on rank {result.rank}"
            )
