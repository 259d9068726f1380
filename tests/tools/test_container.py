"""The image and the devcontainer: what they name is here, and the image's files are a package."""

import json
import re
import shutil
import subprocess
import sys
import zipfile
from fnmatch import fnmatch

import pytest

from tests.tools.test_readme import ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
IGNORED = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
SENT = [name[1:] for name in IGNORED if name.startswith("!")]
"""What the build of the image gets."""


def test_the_image_gets_what_the_package_needs_and_its_extras_exist():
    assert IGNORED[0] == "*" and all((ROOT / name).exists() for name in SENT)
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (extras,) = re.findall(r"/opt/titanlite\[([\w,]+)\]", DOCKERFILE)
    assert all(re.search(rf"^{extra} = \[", project, re.MULTILINE) for extra in extras.split(","))
    for name in re.findall(r'^(?:readme|license-files) = \[?"([^"]+)"', project, re.MULTILINE):
        assert name in SENT


def test_the_devcontainer_runs_a_command_that_is_here():
    text = (ROOT / ".devcontainer/devcontainer.json").read_text(encoding="utf-8")
    _, script, option = json.loads(text)["postCreateCommand"].split()
    assert option in (ROOT / script).read_text(encoding="utf-8")


@pytest.mark.nightly
def test_a_package_built_from_the_files_of_the_image_has_the_models_and_configs(tmp_path):
    for name in SENT:
        if (ROOT / name).is_dir():
            skipped = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=skipped)
        else:
            shutil.copy(ROOT / name, tmp_path)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for pattern in ("*/models/llama3/model.py", "*/train_configs/debug.toml", "*/tools/project/*"):
        assert any(fnmatch(name, pattern) for name in names), pattern


@pytest.mark.nightly
def test_the_image_can_be_built():
    if (
        not shutil.which("docker")
        or subprocess.run(["docker", "info"], capture_output=True).returncode
    ):
        pytest.skip("no Docker daemon is here")
    command = ["docker", "build", "--tag", "titanlite-test", str(ROOT)]
    assert subprocess.run(command).returncode == 0
    shown = ["docker", "run", "--rm", "titanlite-test", "models", "llama3"]
    assert "405B" in subprocess.check_output(shown, text=True)
