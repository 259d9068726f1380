"""The first run on GPUs ends in a table, whatever fails; on fake ones only the comparisons of
numbers fail.
"""

from __future__ import annotations

import re
import runpy
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.gpu import fake_gpu
from tests.messages import says
from tests.runs import ROOT, left_over

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
    assert cells[2][0] == "FAILED" and "'speed'" in cells[2][1]
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
    says(lines[2], "| endless | FAILED | ", "within 2 s")
    says(lines[3], "| later | FAILED | not started")
    assert time.monotonic() - start < 2 + first_light.END_SECONDS
    assert left_over([int(child.read_text())]) == []


def run_on(library: Path, folder: Path, gpus: int, chosen: str, *more: str) -> int:
    """Run rows on this many fake GPUs; return their number. Assert that those that compare numbers
    found only wrong ones, and that all others are ok.
    """
    options = ("--package=on_fake_gpu", "--patience=6", "--seconds=3000", f"--folder={folder}/out")
    script = ("scripts/first_light.py", *options, f"--rows={chosen}", *more)
    _, out = fake_gpu.program(library, folder, gpus, *script)
    says(out, f"{gpus} x NVIDIA H100 80GB HBM3")
    rows = re.findall(r"^\| (.+?) \| (ok|FAILED) \| (.*) \| \d+ \|$", out, re.MULTILINE)
    failed = {name: text for name, mark, text in rows if mark != "ok"}
    assert {*failed} == COMPARE_NUMBERS & {name for name, *_ in rows}, failed
    for output in folder.glob("out/*/*-verify*/output.txt"):
        verified = re.findall(r"^ +\d+  .*", output.read_text(), re.MULTILINE)
        assert verified
        for line in verified:  # an exception in a step would be named instead
            assert "FAIL  initial value" in line
    return len(rows)


@pytest.mark.nightly
def test_on_fake_gpus_only_comparisons_of_numbers_fail(fake_gpus, tmp_path):
    """Rows that compile nothing, and of verify the shorter one."""
    assert run_on(fake_gpus, tmp_path, 1, "versions|bandw|verify experts|killed") == 4


@pytest.mark.nightly
@pytest.mark.parametrize(("gpus", "rows"), [(1, 17), (4, 20)])
def test_all_rows_run_on_fake_gpus(fake_gpus, tmp_path, gpus, rows):
    assert run_on(fake_gpus, tmp_path, gpus, "") == rows


@pytest.mark.nightly
def test_the_comparison_runs_on_a_fake_gpu(fake_gpus, tmp_path):
    """With this checkout as the earlier one."""
    more = "--compare", f"--before={ROOT}"
    assert run_on(fake_gpus, tmp_path, 1, "1b", *more) == 2 + bool(find_spec("torchtitan"))
