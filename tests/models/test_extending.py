"""The model on the page docs/extending.md passes the proof, and its commands are valid."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.runs import environment
from titanlite.cli import main
from titanlite.verify.model_under_test import read_model
from titanlite.verify.pool import Pool
from titanlite.verify.runner import PRELOAD, row_runner
from titanlite.verify.table import Row

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    """Write the page's files into a folder, and return it."""
    root = tmp_path_factory.mktemp("extending")
    for name, code in re.findall(r"```python\n# (tiny/\S+)\n(.*?)```", PAGE, re.DOTALL):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(code)
    assert {path.name for path in (root / "tiny").iterdir()} == {"__init__.py", "model.py"}
    return root


@pytest.mark.long
def test_model_of_the_page_passes_rows_of_the_table(package, monkeypatch):
    """Three of the rows; the page's command runs all pairs."""
    monkeypatch.syspath_prepend(package)
    rows = [
        Row("dp2 x tp2", "op", prefetch="2", variant="frozen"),
        Row("hsdp2x2", "2nd", reshard="never"),
    ]
    rows += [Row("cp2 x tp2", documents="on")]
    model = read_model(["--model.package=tiny", "--model.name=tiny"], {})
    with (
        closing(Pool(4, PRELOAD)) as ranks,
        row_runner(model, ranks) as run,
    ):  # ranks that find the package
        for row in rows:
            result = run(row)
            assert result.passed, f"{row}: {result.what} {result.error:.1e}"


@pytest.mark.long
def test_a_wrong_role_in_the_table_is_named_with_its_row(package, tmp_path):
    shutil.copytree(package / "tiny", tmp_path / "tiny")
    table = (tmp_path / "tiny/__init__.py").read_text()
    wrong = table.replace(', "feed_forward.up")', ")").replace(
        '"feed_forward.down")', '"feed_forward.down", "feed_forward.up")'
    )
    (tmp_path / "tiny/__init__.py").write_text(wrong)
    command = [
        sys.executable,
        "-m",
        "titanlite",
        *"verify --model.package tiny --model.name tiny --only #1".split(),
    ]
    done = subprocess.run(
        command, env=environment(), cwd=tmp_path, capture_output=True, text=True, check=False
    )
    line = (
        "the model's table: the row layers.*.feed_forward.up.weight = row is wrong: "
        "with column this layout passes"
    )
    assert (
        done.returncode == 1 and done.stdout.count("the model's table") == 1 and line in done.stdout
    ), done.stdout


def test_commands_of_the_page_find_the_package_in_the_current_folder(package):
    """The training command is checked only; the proof's is run as far as its list of faults."""
    (train,) = re.findall(r"`titanlite train (--model\.package tiny .*?)`", PAGE, re.DOTALL)
    installed = Path(sys.executable).with_name(
        "titanlite"
    )  # a script has its own folder on the path, not this one
    subprocess.run(
        [installed, "config", *train.split()], check=True, env=environment(), cwd=package
    )
    (words,) = re.findall(r"^titanlite verify (.*)$", PAGE, re.MULTILINE)
    assert main(["verify", *words.split(), "--fault", "list"]) == 0
