"""`titanlite tour`: its commands, what it kills, and how it fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.messages import says
from tests.runs import left_over
from tests.tools.conftest import record, write
from titanlite.tools import tour


def test_a_tour_that_fails_says_what_differs_and_by_how_much(tool, monkeypatch, tmp_path):
    def run(folder: Path, validation: float) -> str:
        steps = [record(step, 2.0) for step in range(1, tour.STEPS + 1)]
        write(folder, steps, [(tour.STEPS, validation)])
        return "resumed step 20"

    losses = {"2": 2.80, "1": 2.84}
    monkeypatch.setattr(tour, "_train_and_kill", lambda dump: run(dump, losses["2"]))
    monkeypatch.setattr(tour, "latest_complete", lambda _: 20)
    monkeypatch.setattr(tour, "_titanlite", lambda _, folder, NGPU: run(folder, losses[NGPU]))
    out = tool("tour", "--to", tmp_path, code=2)
    says(out, "FAILED: ", "4.0e-02", "1e-04")
    says(out, f"{tmp_path}/run/metrics.jsonl", f"{tmp_path}/single/metrics.jsonl")


def test_the_tour_kills_processes_in_their_own_sessions():
    child = "import subprocess as s, time; p = s.Popen(['sleep', '60'], start_new_session=True)"
    child += "; print(p.pid, flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE)
    assert process.stdout is not None
    grandchild = int(process.stdout.readline())
    tour._kill_all(process)
    assert not left_over([grandchild]) and process.returncode == -9
