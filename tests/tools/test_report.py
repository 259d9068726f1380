"""`titanlite top` and `titanlite report`: a run as its files show it, whatever is missing."""

import json
import math
import os
import pty
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import TINY
from tests.runs import environment, train
from tests.tools.test_plot import record, write
from titanlite.cli import main
from titanlite.config.schema import JobConfig, with_values
from titanlite.config.toml import to_toml
from titanlite.observe.metrics import JsonLines
from titanlite.tools.record import chart
from titanlite.tools.top import view

SUFFERED = [
    (8, {"checkpoint_blocked_seconds": 0.25, "checkpoint_write_seconds": 1.5}),
    (9, {"bad_norm": None, "skipped": 1}),
]


@pytest.fixture
def run(tmp_path) -> Path:
    """A run of two ranks that was restarted, saved and skipped a step; its last step is 20."""
    steps = [record(s, 4 - s / 10, memory_gib=1 + s / 10) for s in range(1, 11)]
    folder = write(tmp_path / "run", steps, [(5, 3.5), (10, 2.875)])
    sink = JsonLines(folder / "metrics.jsonl", 99)
    for step, values in SUFFERED:
        sink.write(step, values, {})
    sink.close()
    logs = folder / "logs"
    for name in ("attempt-2", "attempt-3"):
        (logs / name).mkdir(parents=True)
    (logs / "hang-1.txt").write_text("rank 1 hung")
    (logs / "launcher.log").write_text("titanlite: planned peak 52.5 MiB a rank, in head; else\n")
    beat = {"phase": "forward", "step": 11, "seconds": 0.2, "host": "a"}
    other = {**beat, "phase": "data", "seconds": 31.0, "host": "b"}
    (logs / "ranks.json").write_text(json.dumps({0: beat, 1: other}))
    config = with_values(JobConfig(), {"training.steps": 20, "optimizer.lr": 0.125})
    (folder / "config.toml").write_text(to_toml(config))
    mesh = {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 1}
    (folder / "environment.json").write_text(json.dumps({"mesh": mesh, "host": "<b>"}))
    return folder


def test_the_view_has_curves_events_and_the_place_of_each_rank(run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["top", str(run)]) == 0
    out = capsys.readouterr().out
    assert "step 10 of 20, eta 10:00:00" in out
    for line in (
        r"loss +3 +█▇.*▁",
        r"validation_loss +2\.875 ",
        r"memory +2\.00 GiB measured, planned 52\.5 MiB a rank, in head",
        r"saves +1; step 8 in 1\.50 s, 0\.25 s of waiting",
        r"restarts +3 since the last start",
        r"hangs +1 since the last start",
        r"bad steps +1",
        r"0 +forward +11 +0\.2 +a",
        r"1 +data +11 +31\.0 +b",
    ):
        assert re.search(f"(?m)^ +{line}$", out) or re.search(line, out), line


def test_on_a_cpu_the_measured_memory_is_said_to_be_of_the_whole_process(run, capsys):
    (run / "environment.json").write_text('{"device": "cpu"}')
    assert main(["top", str(run)]) == 0
    whole = "2.00 GiB measured (the whole process, with Python and torch), planned 52.5 MiB"
    assert whole in capsys.readouterr().out


def test_in_a_terminal_the_view_follows_the_run_until_ctrl_c(run):
    controller, terminal = pty.openpty()
    command = [sys.executable, "-m", "titanlite", "top", run.name]
    streams: dict[str, Any] = {"stdin": terminal, "stdout": terminal, "stderr": terminal}
    # Tests in the background may inherit an ignored one.
    streams["preexec_fn"] = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    variables = environment(TERM="xterm", COLUMNS="80", LINES="50")
    process = subprocess.Popen(command, cwd=run.parent, env=variables, **streams)
    os.close(terminal)
    shown = b""

    def wait_for(text: bytes) -> None:
        nonlocal shown
        while text not in shown:
            assert b"Traceback" not in shown, shown.decode()
            shown += os.read(controller, 1 << 16)

    wait_for(b"step 10 of 20")
    sink = JsonLines(run / "metrics.jsonl", 99)
    sink.write(11, asdict(record(11, 2.5, memory_gib=2.0)), {})
    sink.close()
    wait_for(b"step 11 of 20")
    process.send_signal(signal.SIGINT)
    with suppress(OSError):  # the other end is closed
        while rest := os.read(controller, 1 << 16):
            shown += rest
    os.close(controller)
    assert process.wait(30) == 0 and b"Traceback" not in shown


@pytest.mark.parametrize("columns", ["40", "80"])
def test_the_view_is_as_wide_as_the_terminal(run, capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["top", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]  # the first one has the path of the folder
    assert 30 < max(map(len, lines)) <= int(columns)
    assert lines[0].startswith("  loss ") and lines[1].startswith("  validation_loss ")


def test_of_half_a_run_there_is_what_its_files_have(run, capsys):
    """Such as one of an older version, or started by torchrun."""
    for name in ("config.toml", "logs/ranks.json", "logs/launcher.log", "environment.json"):
        (run / name).unlink()
    file = run / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        line.pop("memory_gib", None)
    file.write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 11, "lo')
    for argv in (["top", str(run)], ["report", str(run), "--html", str(run / "page.html")]):
        assert main(argv) == 0
    assert "not planned yet" in capsys.readouterr().out and (run / "page.html").exists()
    file.write_text("")
    assert main(["top", str(run)]) == 0
    assert main(argv) == 2
    assert "no logged step yet" in capsys.readouterr().err


def test_a_run_that_ended_early_or_resumes_has_no_time_left(run, capsys):
    places = run / "logs/ranks.json"
    places.write_text(places.read_text().replace("forward", "ended").replace("data", "ended"))
    assert main(["top", str(run)]) == 0
    assert "step 11 of 20, stopped" in capsys.readouterr().out, "not the last logged one"
    (run / "config.toml").unlink()  # a start moves it away, and writes another
    places.unlink()
    assert main(["top", str(run)]) == 0
    out = capsys.readouterr().out
    assert f"{run}: starting\n" in out and "Ranks: not known yet" in out and "eta" not in out


def test_a_run_whose_launcher_is_gone_shows_for_how_long(run, capsys):
    old = time.time() - 90
    os.utime(run / "logs/ranks.json", (old, old))
    assert main(["top", str(run)]) == 0
    assert "step 10 of 20, no sign of life for 1:3" in capsys.readouterr().out


def test_a_page_says_how_far_a_run_is_and_how_it_ended(run):
    log = run / "logs/launcher.log"
    log.write_text(f"{log.read_text()}ended: rank 1: exited without a traceback (SIGTERM)\n")
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "step 10 of 20, ended" in page
    assert "rank 1: exited without a traceback (SIGTERM)" in page


def test_a_low_terminal_keeps_the_ranks_and_leaves_out_curves(run):
    whole, _ = view(run)
    low, _ = view(run, 15)
    assert len(whole.splitlines()) > 15 >= len(low.splitlines())
    assert "loss" in low and re.search("1 +data", low)


def test_a_run_that_starts_has_a_view_before_its_first_step(run, capsys):
    """The files that a start writes first: its logs."""
    (run / "metrics.jsonl").unlink()
    (run / "config.toml").unlink()
    assert main(["top", str(run)]) == 0
    out = capsys.readouterr().out
    assert f"{run}: starting, no step logged yet\n  launcher  planned peak 52.5 MiB" in out
    assert re.search(r"0 +forward +11 +0\.2 +a\n", out)
    assert main(["report", str(run), "--html", f"{run}/page.html"]) == 2
    assert "has no logged step yet" in capsys.readouterr().err


def test_a_run_at_its_last_step_is_done(run, capsys):
    sink = JsonLines(run / "metrics.jsonl", 99)
    sink.write(20, asdict(record(20, 2.0, memory_gib=2.0)), {})
    sink.close()
    assert main(["top", str(run)]) == 0
    assert "step 20 of 20, done\n" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["top", "plot"])
def test_of_the_folder_of_a_sweep_the_runs_are_named(tmp_path, capsys, command):
    for value in ("1e-3", "4e-3"):
        write(tmp_path / f"optimizer.lr={value}", [record(1, 4.0)])
    assert main([command, str(tmp_path)]) == 2
    runs = ", ".join(f"{tmp_path}/optimizer.lr={value}" for value in ("1e-3", "4e-3"))
    assert f"; runs below it: {runs}; titanlite plot" in capsys.readouterr().err


def test_a_folder_without_a_run_is_one_line(tmp_path, capsys):
    for argv in (["top", str(tmp_path)], ["report", f"{tmp_path}/absent", "--html", "a.html"]):
        assert main(argv) == 2
        error = capsys.readouterr().err
        assert "does not exist; give the dump folder of a run" in error and error.count("\n") == 1


def test_the_page_says_what_was_trained_and_when_and_lies_in_the_dump_folder(run, capsys):
    config = {"training.steps": 20, "job.description": "a <small> Llama"}
    (run / "config.toml").write_text(to_toml(with_values(JobConfig(), config)))
    (run / "environment.json").write_text('{"started": "2026-11-27T10:00:00+0000"}')
    facts = {"model": "llama3 debugmodel, 9 parameters", "device": "CPU, 2 ranks", "data": "text"}
    log = [f"{name:<10} {text}" for name, text in facts.items()]
    (run / "logs/rank-0.log").write_text("\n".join([*log, "step:  1  loss:  6"]))
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out == f"wrote {run}/report.html\n"
    text = (run / "report.html").read_text()
    assert "<title>a &lt;small&gt; Llama</title>" in text and "<h2>Mesh</h2><" in text
    rows = {**facts, "folder": str(run), "started": "2026-11-27T10:00:00+0000"}
    for name, value in rows.items():
        assert f"<td>{name}</td><td>{value}</td>" in text
    today = datetime.now().astimezone().strftime("%Y-%m-%d")
    assert re.search(rf"<td>this page</td><td>{today}T[\d:]+[+-]\d+</td>", text)


def test_the_page_has_the_run_and_needs_nothing_else(run, capsys):
    page = run / "page.html"
    assert main(["report", str(run), "--html", str(page)]) == 0
    text = page.read_text()
    for part in (
        "<svg",
        "Training loss",
        "optimizer.lr</td><td>0.0008 -&gt; 0.125",
        "dp_shard 2</h1>",
        'id="mesh-picture"',
        "<td>10</td><td>2.87500</td>",
        "2.00 GiB measured, planned 52.5 MiB",
        "<td>hangs</td><td>1 since the last start</td>",
        "&lt;b&gt;",
    ):
        assert part in text, part
    assert text.count('class="node"') == 2, "a rank on each of two hosts"
    assert not re.search(r"<(script|link|iframe|img|b>)|\bsrc=|href=\"[^#]|@import", text)
    assert main(["report", str(run), "--html", f"{run}/absent/a.html"]) == 2
    assert "a.html can't be written: No such file" in capsys.readouterr().err


def test_a_chart_rises_with_its_values_and_has_a_gap_where_one_is_not_finite():
    import numpy as np

    assert chart(np.array([1.0, 2.0, math.nan, 8.0]), 9) == "▁▂ █"
    assert chart(np.arange(100.0), 8) == "▁▂▃▄▅▆▇█" and len({*chart(np.ones(3), 9)}) == 1


def test_a_terminal_without_blocks_has_a_chart_of_other_characters(run, monkeypatch, capsys):
    import io

    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    assert main(["top", str(run)]) == 0
    out.seek(0)
    assert re.search(r"loss +3 +#.*_", out.read())


@pytest.mark.exhaustive
def test_a_launcher_leaves_the_places_of_its_ranks(tmp_path, capsys):
    assert train([*TINY, "--training.steps=3"], tmp_path, NGPU="2")[0] == 0
    places = json.loads((tmp_path / "logs/ranks.json").read_text())
    assert [place["phase"] for place in places.values()] == ["ended", "ended"]
    assert main(["top", str(tmp_path)]) == 0
    assert re.search(r"1 +ended +3 ", capsys.readouterr().out)
