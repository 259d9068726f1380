"""A project that `titanlite init` wrote trains and passes its own proof at once."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import environment
from titanlite.cli import main


@pytest.fixture
def project(tmp_path, monkeypatch, capsys) -> Path:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "my_model"]) == 0
    assert "cd my_model\n" in capsys.readouterr().out
    return tmp_path / "my_model"


def in_project(project: Path, *words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", *words],
        cwd=project,
        env=environment(NGPU="1"),
        capture_output=True,
        text=True,
    )


def test_the_model_of_a_project_has_a_row_for_each_parameter(project):
    placements = in_project(
        project, "titanlite", "config", "--placements", "--config", "my_model.toml"
    )
    assert placements.returncode == 0, placements.stderr
    assert "layers.*.feed_forward.w2.weight" in placements.stdout


def test_the_commands_of_a_projects_page_need_nothing_more(project):
    """A first start installs no pytest, and the config is for a laptop."""
    page = (project / "README.md").read_text()
    assert "pip install pytest && pytest " in page
    plan = re.search(r"^titanlite (plan (.*\\\n)*.*)", page, re.M)
    assert plan, page
    words = plan[1].replace("\\\n", "").replace(" 1B ", " debugmodel ").split()
    planned = in_project(project, "titanlite", *words)
    assert planned.returncode == 0 and "It fits: " in planned.stdout, planned.stdout
    assert "65,536 tokens, batch 8 " in planned.stdout, "not the sequences of the laptop"


def test_the_scripts_of_a_project_are_its_own(project):
    texts = {path: path.read_text() for path in project.rglob("*") if path.is_file()}
    assert not [path for path, text in texts.items() if "PROJECT" in f"{path.name} {text}"]
    script = texts[project / "train.slurm"]
    assert ' titanlite train --config my_model.toml "$@" &' in script
    assert "run_train" not in script and "checkout" not in script
    assert subprocess.run(["bash", "-n", project / "train.slurm"]).returncode == 0


@pytest.mark.long
def test_a_project_trains_and_passes_its_own_test(project):
    few = ["--training.steps=2", "--validation.no_enable", "--generate.no_at_end"]
    run = in_project(project, "titanlite", "train", "--config", "my_model.toml", *few)
    assert run.returncode == 0 and "step 2 reached" in run.stdout, run.stdout + run.stderr
    proof = in_project(project, "pytest", "-q", "-p", "no:cacheprovider")
    assert proof.returncode == 0 and "1 passed" in proof.stdout, proof.stdout


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("3x", "must be a name for a Python package"),
        ("My-Model", "must be a name for a Python package"),
        ("lambda", "must be a name for a Python package"),
        ("torch", "is a Python package already"),
        ("llama3", "is a model of titanlite"),
        ("taken", "exists already, and was left as it is"),
    ],
)
def test_a_name_that_cannot_be_had_is_refused_in_one_line(name, why, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    assert main(["init", name]) == 2
    assert why in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["taken"]
