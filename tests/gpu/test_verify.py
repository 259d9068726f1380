"""`titanlite verify --device cuda` runs on GPUs; its numbers are not judged here: all are zero."""

from __future__ import annotations

import re

import pytest

from tests.gpu import fake_gpu


@pytest.mark.long
def test_rows_run_on_gpus_and_are_compared_with_a_cpu(fake_gpus, tmp_path):
    """test_first_light.py has a row of experts, whose ranks share a GPU."""
    verify = "-m titanlite verify --device=cuda --model.package=on_fake_gpu --ranks=2"
    code, out = fake_gpu.program(fake_gpus, tmp_path, 2, *verify.split(), "--only=tp2,pp2")
    assert code == 1, out
    rows = [line for line in out.splitlines() if re.match(r" +\d+  \S", line)]
    assert len(rows) == 4
    for row in rows:  # an exception in a step would be told instead
        assert "FAIL  initial value" in row, row
    traces = fake_gpu.read_traces(tmp_path / "traces")
    assert len(traces) == 2
    assert fake_gpu.mismatches(traces) == []
    for trace in traces:
        assert trace.of("launch", "collective")
