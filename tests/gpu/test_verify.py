"""`titanlite verify --device cuda` runs on GPUs; its numbers are not judged here: all are zero."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.gpu import fake_gpu
from tests.lanes import sample
from tests.runs import ROOT, environment


@pytest.mark.parametrize(
    ("only", "model", "gpus"),
    sample([("tp2,pp2", "llama3", 2), ("ep2", "qwen3", 1)], long=[("ep2", "qwen3", 1)]),
)
def test_rows_run_on_gpus_and_are_compared_with_a_cpu(fake_gpus, tmp_path, only, model, gpus):
    """Also two ranks that share a GPU."""
    variables = {**environment(), **fake_gpu.environment(fake_gpus, tmp_path / "traces", gpus)}
    command = [sys.executable, "-m", "titanlite", "verify", "--device=cuda", f"--only={only}"]
    command += ["--model.package=on_fake_gpu", f"--model.name={model}", "--ranks=2"]
    if model == "qwen3":
        command.append("--model.flavor=debugmodel_moe")
    done = subprocess.run(
        command, env={**os.environ, **variables}, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if re.match(r" +\d+  \S", line)]
    assert len(rows) == 2 * len(only.split(","))
    for row in rows:  # an exception in a step would be told instead
        assert "FAIL  initial value of " in row, row
    traces = fake_gpu.read_traces(tmp_path / "traces")
    assert len(traces) == 2
    assert fake_gpu.mismatches(traces) == []
    for trace in traces:
        assert trace.of("launch", "collective")
