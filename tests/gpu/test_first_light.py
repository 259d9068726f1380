"""The first run on GPUs ends in a table, whatever fails; on fake ones only the comparisons of
numbers fail.
"""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.gpu import fake_gpu
from tests.gpu.conftest import only_with_compile
from tests.lanes import sample
from tests.runs import ROOT, environment, left_over

COMPARE_NUMBERS = {"verify", "verify experts"}
"""On fake GPUs all that the host reads is zero."""
first_light = SimpleNamespace(**runpy.run_path(str(ROOT / "scripts" / "first_light.py")))


def row(name: str, seconds: float, program: str, pattern: str = "", code: int = 0):
    command = [sys.executable, "-c", program]
    return first_light.Row(name, seconds, command, first_light.shows(pattern), code)


def test_a_row_that_fails_has_its_reason_and_the_next_ones_run(tmp_path):
    rows = [
        row("good", 60, "print('speed 7 GB/s')", r"speed (\S+)"),
        row("other code", 60, "raise SystemExit('Error: no driver')"),
        row("no line", 60, "print('something else')", "speed"),
        row("expected code", 60, "raise SystemExit(3)", code=3),
    ]
    passed, lines = first_light.table(rows, 60, tmp_path)
    cells = [line.split(" | ")[1:3] for line in lines[2:]]
    assert not passed
    assert cells[0] == ["ok", "7"]
    assert cells[1] == ["FAILED", "exit 1: Error: no driver"]
    assert cells[2] == ["FAILED", "no 'speed' in the output"]
    assert cells[3][0] == "ok"
    assert (tmp_path / "02-no-line/output.txt").read_text() == "something else\n"


def test_a_row_without_an_end_is_ended_with_all_that_it_started(tmp_path):
    child = tmp_path / "child"
    program = (
        "import subprocess, sys, time; "
        "own = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)']); "
        f"open({str(child)!r}, 'w').write(str(own.pid)); time.sleep(100)"
    )
    rows = [row("endless", 2, program), row("later", 60, "")]
    start = time.monotonic()
    _, lines = first_light.table(rows, 2, tmp_path)
    assert "| endless | FAILED | not done within 2 s: " in lines[2]
    assert "| later | FAILED | not started: no time was left |" in lines[3]
    assert time.monotonic() - start < 2 + first_light.END_SECONDS
    assert left_over([int(child.read_text())]) == []


def run_on(library: Path, folder: Path, gpus: int, chosen: str) -> dict[str, tuple[str, str]]:
    """Return mark and text of each row on so many fake GPUs."""
    variables = {**environment(), **fake_gpu.environment(library, folder / "traces", gpus)}
    command = [sys.executable, "scripts/first_light.py", "--package=on_fake_gpu", "--patience=6"]
    command += ["--seconds=3000", f"--folder={folder}/out", f"--rows={chosen}"]
    done = subprocess.run(
        command, env={**os.environ, **variables}, cwd=ROOT, capture_output=True, text=True
    )
    found = re.findall(r"^\| (.+?) \| (ok|FAILED) \| (.*) \| \d+ \|$", done.stdout, re.MULTILINE)
    assert f"{gpus} x NVIDIA H100 80GB HBM3" in done.stdout, done.stdout + done.stderr
    return {name: (mark, text) for name, mark, text in found}


def judge(rows: dict[str, tuple[str, str]], folder: Path) -> None:
    """Assert that rows are ok, and that those which compare numbers found only wrong ones."""
    failed = {name: text for name, (mark, text) in rows.items() if mark != "ok"}
    assert {*failed} == COMPARE_NUMBERS & {*rows}, failed
    for output in folder.glob("out/*/*-verify*/output.txt"):
        verified = re.findall(r"^ +\d+  .*", output.read_text(), re.MULTILINE)
        assert verified
        for line in verified:  # an exception in a step would be named instead
            assert "FAIL  initial value of " in line


@pytest.mark.parametrize(
    ("chosen", "count"),
    sample(
        [
            ("versions|bandw|verify experts|killed", 4),
            ("versions|bandw|verify experts|hang|kernel|killed|memory|resume", 9),
        ],
        every=2,
    ),
)
def test_on_fake_gpus_only_comparisons_of_numbers_fail(fake_gpus, tmp_path, chosen, count):
    """The rows that compile nothing, and of verify the shorter one."""
    rows = run_on(fake_gpus, tmp_path, 1, chosen)
    assert len(rows) == count
    judge(rows, tmp_path)


@only_with_compile
@pytest.mark.parametrize("gpus", [1, 4])
def test_all_rows_run_on_fake_gpus(fake_gpus, tmp_path, gpus):
    rows = run_on(fake_gpus, tmp_path, gpus, "")
    assert len(rows) == (17 if gpus == 1 else 20)
    judge(rows, tmp_path)
