"""The tests run on a machine with a GPU too: those that need one pass, and the others do not use
it.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.gpu import fake_gpu
from tests.lanes import sample
from tests.runs import ROOT

WAITING = ("tests/train/test_waiting.py", "synchronizes and False", 14)
FILES = [
    WAITING,
    ("tests/faults/test_restart.py", "killed_rank_is_replaced", 1),
    # On an H100 ranks of the pool that compiled had failed: they are forks.
    ("tests/models/test_attention.py", "full and tp and compiled", 1),
]


@pytest.mark.parametrize(("file", "names", "passed"), sample(FILES, long=[WAITING]))
def test_tests_pass_on_a_machine_with_one_gpu(fake_gpus, tmp_path, file, names, passed):
    variables = {**os.environ, **fake_gpu.environment(fake_gpus, tmp_path / "traces", 1)}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--basetemp={tmp_path}/own",
        file,
    ]
    done = subprocess.run(
        [*command, "-k", names],
        env=variables,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and done.stdout.startswith("." * passed + " "), done.stdout
