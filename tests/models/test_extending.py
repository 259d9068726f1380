"""The model on the page docs/extending.md passes the proof, and its commands are valid."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.messages import says
from tests.runs import environment, python
from titanlite.verify.model_under_test import ModelUnderTest, read_model
from titanlite.verify.pool import Pool
from titanlite.verify.runner import PRELOAD, row_runner
from titanlite.verify.table import Row

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    """Write the page's files into a folder, and a copy with a wrong role; return the folder."""
    root = tmp_path_factory.mktemp("extending")
    for name, code in re.findall(r"```python\n# (tiny/\S+)\n(.*?)```", PAGE, re.DOTALL):
        copy = code.replace("tiny", "wrong").replace(', "feed_forward.up")', ")")
        copy = copy.replace('"feed_forward.down")', '"feed_forward.down", "feed_forward.up")')
        for path, text in ((root / name, code), (root / name.replace("tiny", "wrong"), copy)):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
    assert {path.name for path in (root / "tiny").iterdir()} == {"__init__.py", "model.py"}
    return root


@pytest.fixture(scope="module")
def ranks(package) -> Iterator[Pool]:
    """Ranks that find the packages."""
    with pytest.MonkeyPatch.context() as patch, closing(Pool(4, PRELOAD)) as pool:
        patch.syspath_prepend(package)
        yield pool


def model(name: str) -> ModelUnderTest:
    return read_model([f"--model.package={name}", f"--model.name={name}"], {})


@pytest.mark.long
def test_model_of_the_page_passes_rows_of_the_table(ranks):
    """Three of the rows; the page's command runs all pairs."""
    rows = [
        Row("dp2 x tp2", "op", prefetch="2", variant="frozen"),
        Row("hsdp2x2", "2nd", reshard="never"),
        Row("cp2 x tp2", documents="on"),
    ]
    with row_runner(model("tiny"), ranks) as run:
        for row in rows:
            result = run(row)
            assert result.passed, f"{row}: {result.what} {result.error:.1e}"


@pytest.mark.long
def test_a_wrong_role_in_the_table_is_named_with_its_row(ranks):
    with row_runner(model("wrong"), ranks) as run:
        says(run.wrong_role("tp2"), "layers.*.feed_forward.up.weight = row", "with column")


def test_commands_of_the_page_find_the_package_in_the_current_folder(package):
    """The training command is checked only; the proof's is run until it has read the model."""
    (train,) = re.findall(r"`titanlite train (--model\.package tiny .*?)`", PAGE, re.DOTALL)
    # A script has its own folder on the path, not this one
    words = [Path(sys.executable).with_name("titanlite"), "config", *train.split()]
    subprocess.run(words, check=True, env=environment(), cwd=package)
    (words,) = re.findall(r"^titanlite verify (.*)$", PAGE, re.MULTILINE)
    verify = ("-m", "titanlite", "verify", *words.split(), "--only", "none")
    done = python(*verify, folder=package)
    says(done.stderr, "none (unknown)", "#1 to #")
