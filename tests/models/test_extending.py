"""The model on the page docs/extending.md is proved as the page says, and trains."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.run import environment
from titanlite.cli import main
from titanlite.verify.model_under_test import read_subject
from titanlite.verify.runner import proof
from titanlite.verify.table import Row

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    """The page's files, where Python finds them."""
    root = tmp_path_factory.mktemp("extending")
    for name, code in re.findall(r"```python\n# (tiny/\S+)\n(.*?)```", PAGE, re.DOTALL):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(code)
    assert {path.name for path in (root / "tiny").iterdir()} == {"__init__.py", "model.py"}
    return root


def test_model_of_the_page_passes_rows_of_the_table(package, monkeypatch):
    """Two of the rows; the page's command runs all pairs."""
    monkeypatch.syspath_prepend(package)
    rows = [Row("dp2 x tp2", "op", prefetch="2", variant="frozen"), Row("hsdp2x2", "2nd", reshard="never")]
    with proof(read_subject(["--model.package=tiny", "--model.name=tiny"], {}), ranks=4) as prove:
        for row in rows:
            result = prove(row)
            assert result.passed, f"{row}: {result.what} {result.error:.1e}"


def test_commands_of_the_page_are_valid(package, monkeypatch):
    """The training command is judged sound; the proof's is taken as far as its list of faults."""
    monkeypatch.syspath_prepend(package)
    (train,) = re.findall(r"`\./run_train\.sh (--model\.package tiny .*?)`", PAGE, re.DOTALL)
    path = os.pathsep.join([str(package), environment()["PYTHONPATH"]])
    command = [sys.executable, "-m", "titanlite", "config", *train.split()]
    subprocess.run(command, check=True, env=environment(PYTHONPATH=path))
    (words,) = re.findall(r"^titanlite verify (.*)$", PAGE, re.MULTILINE)
    assert main(["verify", *words.split(), "--fault", "list"]) == 0
