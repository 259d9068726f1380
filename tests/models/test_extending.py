"""The model on the page docs/extending.md is proved as the page says, and trains."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.run import environment

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


def run(package: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environ = environment()
    environ["PYTHONPATH"] = os.pathsep.join([str(package), environ.get("PYTHONPATH", "")])
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, env=environ)


def test_the_pages_model_equals_one_process_in_rows_of_the_table(package):
    """A few of the rows; the page's command runs all pairs."""
    code = """
if __name__ == "__main__":
    from titanlite.verify.proof import proof
    from titanlite.verify.subject import read_subject
    from titanlite.verify.table import Row

    rows = [
        Row("dp2 x tp2", "op", prefetch="2", variant="frozen"),
        Row("hsdp2x2", "2nd", "aot_eager", reshard="never"),
    ]
    with proof(read_subject(["--model.package=tiny", "--model.name=tiny"], {}), ranks=4) as prove:
        for row in rows:
            result = prove(row)
            print(result.passed, result.what, result.error, row)
"""
    (package / "prove.py").write_text(code)
    done = run(package, str(package / "prove.py"))
    assert done.returncode == 0, done.stderr
    assert len(re.findall("^True", done.stdout, re.MULTILINE)) == 2, done.stdout


def test_the_pages_commands_are_understood(package):
    """The training command is judged sound; the proof's is taken as far as its list of faults."""
    (train,) = re.findall(r"`\./run_train\.sh (--model\.package tiny .*?)`", PAGE, re.DOTALL)
    done = run(package, "-m", "titanlite", "config", *train.split())
    assert done.returncode == 0, done.stderr
    (verify,) = re.findall(r"^titanlite (verify .*)$", PAGE, re.MULTILINE)
    done = run(package, "-m", "titanlite", *verify.split(), "--fault", "list")
    assert done.returncode == 0, done.stderr
