"""A project that `titanlite init` wrote trains and passes its own proof at once."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.messages import says
from tests.runs import environment
from titanlite.cli import main


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("projects")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["init", "my_model"]) == 0
    return folder / "my_model"


@pytest.fixture
def project(written, monkeypatch) -> Path:
    monkeypatch.chdir(written)
    monkeypatch.syspath_prepend(str(written))
    return written


def in_project(project: Path, *words: str) -> str:
    command = [sys.executable, "-m", *words]
    options = {"cwd": project, "env": environment(NGPU="1"), "text": True}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_model_of_a_project_has_a_row_for_each_parameter(project, tool):
    placements = tool("config --placements --config my_model.toml")
    says(placements, "layers.*.feed_forward.w2.weight")


@pytest.mark.long
def test_the_commands_of_a_projects_page_need_nothing_more(project, tool):
    """A first start installs no pytest, and the config is for a laptop."""
    page = (project / "README.md").read_text()
    says(page, "pip install pytest && pytest ")
    plan = re.search(r"^titanlite (plan (.*\\\n)*.*)", page, re.M)
    assert plan, page
    words = plan[1].replace("\\\n", "").replace(" 1B ", " debugmodel ")
    # Not the sequences of the laptop.
    says(tool(words), "It fits: ", "65,536 tokens, batch 8 ")


def test_the_scripts_of_a_project_are_its_own(project):
    for path in project.rglob("*"):
        if path.is_file() and path.suffix != ".pyc":
            assert "PROJECT" not in f"{path.name} {path.read_text()}"
    script = project / "train.slurm"
    text = script.read_text()
    says(text, ' titanlite train --config my_model.toml "$@" &')
    assert "run_train" not in text and "checkout" not in text
    assert subprocess.run(["bash", "-n", script]).returncode == 0


@pytest.mark.nightly
def test_a_project_trains_and_passes_its_own_test(project):
    few = ["--training.steps=2", "--validation.no_enable", "--generate.no_at_end"]
    says(in_project(project, "titanlite", "train", "--config", "my_model.toml", *few), "step 2 ")
    says(in_project(project, "pytest", "-q", "-p", "no:cacheprovider"), "1 passed")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("3x", "my_model"),
        ("My-Model", "my_model"),
        ("lambda", "my_model"),
        ("torch", "Python package"),
        ("llama3", "of titanlite"),
        ("taken", "exists"),
    ],
)
def test_a_name_that_cannot_be_had_is_refused(name, why, tmp_path, monkeypatch, tool):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    says(tool("init", name, code=2), name, why)
    assert [path.name for path in tmp_path.rglob("*")] == ["taken"]
