"""`titanlite top` and `titanlite report`: a run as its files show it, whatever is missing."""

import io
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
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.messages import says
from tests.runs import environment
from tests.tools.conftest import record, write
from titanlite.cli import main
from titanlite.config.schema import JobConfig, with_values
from titanlite.config.toml import to_toml
from titanlite.observe.events import DONE, EVENTS, FAILED, STOPPED, record_event
from titanlite.tools.record import chart
from titanlite.tools.top import view

AT = r"  20\d\d-\d\d-\d\d \d\d:\d\d:\d\d  "
OF_A_START = "config.toml", "environment.json", "logs/ranks.json"
SUFFERED = {
    8: {"checkpoint_blocked_seconds": 0.25, "checkpoint_write_seconds": 1.5},
    9: {"bad_norm": None, "skipped": 1},
}


@pytest.fixture
def run(tmp_path) -> Path:
    """A run of two ranks that was restarted, saved and skipped a step; its last step is 20."""
    steps = [record(s, 4 - s / 10, memory_gib=1 + s / 10) for s in range(1, 11)]
    folder = write(tmp_path / "run", steps, [(5, 3.5), (10, 2.875)], SUFFERED)
    logs = folder / "logs"
    logs.mkdir()
    record_event(folder, "start", attempt=1)
    record_event(folder, "start", attempt=1)  # the machine had lost its power
    record_event(folder, "stop", how=FAILED, why="no space left")
    record_event(folder, "stop", how=FAILED, why="only 1 of 2 nodes")  # before a start
    for attempt in (1, 2):
        record_event(folder, "start", attempt=attempt)
        record_event(folder, "begin", mesh="dp_shard 2", step=5 * attempt)
        record_event(folder, "restart", why="rank 1 on b: SIGKILL; restart 1 of 3")
    record_event(folder, "start", attempt=3)
    (logs / "hang-1.txt").write_text("rank 1 hung")
    beat = {"phase": "forward", "step": 11, "seconds": 0.2, "host": "a"}
    other = {**beat, "phase": "data", "seconds": 31.0, "host": "b"}
    (logs / "ranks.json").write_text(json.dumps({0: beat, 1: other}))
    config = with_values(JobConfig(), {"training.steps": 20, "optimizer.lr": 0.125})
    (folder / "config.toml").write_text(to_toml(config))
    mesh = {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 1}
    (folder / "environment.json").write_text(json.dumps({"mesh": mesh, "host": "<b>"}))
    return folder


def test_the_view_has_curves_events_and_the_place_of_each_rank_in_any_width(run, tool, monkeypatch):
    for columns in (40, 80):
        monkeypatch.setenv("COLUMNS", str(columns))
        title, *lines = tool("top", run).splitlines()
        says(title, "step 10 of 20, eta 10:00:00")
        assert lines[0].startswith("  loss ") and lines[1].startswith("  validation_loss ")
        assert 30 < max(map(len, lines)) <= columns
    for line in (
        r"  loss +3 +█▇.*▁",
        r"  validation_loss +2\.875 .*",
        r"  memory +2\.00 GiB measured",
        r"  saves +1; step 8 in 1\.50 s, 0\.25 s of waiting",
        r"  restarts +2 .*",
        r"  time \(UTC\) +start and end",
        rf"{AT}end not recorded: .*",
        rf"{AT}no space left",
        rf"{AT}only 1 of 2 nodes",
        rf"{AT}dp_shard 2 from step 5; rank 1 on b: SIGKILL; .*",
        rf"{AT}starting",
        r"  hangs +1 .*",
        r"  bad steps +1",
        r" *0 +forward +11 +0\.2 +a *",
        r" *1 +data +11 +31\.0 +b *",
    ):
        assert any(re.fullmatch(line, each) for each in lines), line


def test_commands_about_a_run_are_about_outputs_by_default(saved, tool, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("outputs").symlink_to(saved)
    of_checkpoints = [f"checkpoint {command}" for command in ("ls", "show", "verify")]
    for command in ("top", "plot", "report --html page.html", *of_checkpoints):
        tool(command)


def test_on_a_cpu_the_measured_memory_is_said_to_be_of_the_whole_process(run, tool):
    (run / "environment.json").write_text('{"device": "cpu"}')
    says(tool("top", run), "2.00 GiB measured", "whole process")


@pytest.mark.long
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
    write(run, [record(11, 2.5)])
    wait_for(b"step 11 of 20")
    process.send_signal(signal.SIGINT)
    with suppress(OSError):  # the other end is closed
        while rest := os.read(controller, 1 << 16):
            shown += rest
    os.close(controller)
    assert process.wait(30) == 0 and b"Traceback" not in shown


@pytest.mark.long
def test_of_half_a_run_there_is_what_its_files_have(run, tool):
    """Such as one started by torchrun."""
    for name in (*OF_A_START, EVENTS):
        (run / name).unlink()
    file = run / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        line.pop("memory_gib", None)
    file.write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 11, "lo')
    says(tool("top", run), "not measured yet")
    tool("report", run)
    assert (run / "report.html").exists()
    file.write_text("")
    tool("top", run)
    says(tool("report", run, code=2), "logged step")


def test_a_run_that_ended_early_or_resumes_has_no_time_left(run, tool):
    places = run / "logs/ranks.json"
    places.write_text(places.read_text().replace("forward", "ended").replace("data", "ended"))
    says(tool("top", run), "step 11 of 20, stopped")  # not the last logged one
    (run / "config.toml").unlink()  # a start moves it away, and writes another
    places.unlink()
    out = tool("top", run)
    says(out, f"{run}: starting\n", "Ranks: not known")
    assert "eta" not in out


def test_a_run_is_done_when_its_last_step_is_saved(run, tool):
    write(run, [record(20, 2.0)])
    places = run / "logs/ranks.json"
    says(tool("top", run), "step 20 of 20, forward\n")
    old = time.time() - 90  # killed in its last validation
    os.utime(places, (old, old))
    assert re.search("step 20 of 20, no .* 1:3", tool("top", run))
    record_event(run, "stop", how=STOPPED, why="SIGTERM")
    says(tool("top", run), "step 20 of 20, stopped\n")
    record_event(run, "stop", how=DONE)
    says(tool("top", run), "step 20 of 20, done\n")


def test_a_low_terminal_keeps_the_ranks_and_leaves_out_curves(run):
    whole, _ = view(run)
    low, _ = view(run, 15)
    assert len(whole.splitlines()) > 15 >= len(low.splitlines())
    assert "loss" in low and re.search("1 +data", low)


def test_a_run_that_starts_has_a_view_before_its_first_step(run, tool):
    """The files that a start writes first: its logs."""
    (run / "metrics.jsonl").unlink()
    (run / "config.toml").unlink()
    out = tool("top", run)
    says(out, f"{run}: starting, no")
    assert re.search(r"0 +forward +11 +0\.2 +a\n", out)
    says(tool("report", run, code=2), "logged step")


@pytest.mark.parametrize("command", ["top", "plot"])
def test_of_a_folder_of_several_runs_the_runs_are_named(tmp_path, tool, command):
    runs = [tmp_path / f"optimizer.lr={value}" for value in ("1e-3", "4e-3")]
    for run in runs:
        write(run, [record(1, 4.0)])
    says(tool(command, tmp_path, code=2), ", ".join(map(str, runs)), "titanlite plot")


def test_a_folder_without_a_run_is_one_line(tmp_path, tool):
    for words in (("top", tmp_path), ("report", tmp_path / "absent")):
        out = tool(*words, code=2)
        says(out, words[1], "job.dump_folder")
        assert out.count("\n") == 1


@pytest.mark.long
def test_the_page_says_what_was_trained_and_when_and_lies_in_the_dump_folder(run, tool):
    config = {"training.steps": 20, "job.description": "a <small> Llama"}
    (run / "config.toml").write_text(to_toml(with_values(JobConfig(), config)))
    (run / "environment.json").write_text('{"started": "2026-11-27T10:00:00+0000"}')
    facts = {"model": "llama3 debugmodel, 9 parameters", "device": "CPU, 2 ranks", "data": "text"}
    log = [f"{name:<10} {text}" for name, text in facts.items()]
    (run / "logs/rank-0.log").write_text("\n".join([*log, "step:  1  loss:  6"]))
    end = "rank 1: exited (SIGTERM)"
    record_event(run, "stop", how=FAILED, why=end)
    assert tool("report", run) == f"wrote {run}/report.html\n"
    text = (run / "report.html").read_text()
    says(text, "<title>a &lt;small&gt; Llama</title>", "<h2>Mesh</h2><")
    says(text, "step 10 of 20, failed", end, "<h2>Starts</h2>", "not recorded")
    rows = {**facts, "folder": str(run), "started": "2026-11-27T10:00:00+0000"}
    says(text, *(f"<td>{name}</td><td>{value}</td>" for name, value in rows.items()))
    today = datetime.now().astimezone().strftime("%Y-%m-%d")
    assert re.search(rf"<td>this page</td><td>{today}T[\d:]+[+-]\d+</td>", text)


def test_the_page_has_the_run_and_needs_nothing_else(run, tool):
    page = run / "page.html"
    sample = "a sample, at temperature 0.7:\n\n    def f():\n\n        <b>\n\nsaved"
    (run / "logs/rank-0.log").write_text(sample)
    tool("report", run, "--html", page)
    text = page.read_text()
    says(text, "<h2>Sample, at temperature 0.7</h2><pre>def f():\n\n    &lt;b&gt;</pre>")
    assert re.search(r"<h2>Ranks, \d{4}-[\d-]+ [\d:]+ ", text), "a time that holds tomorrow too"
    says(text, '<table id="progress">', "<td>3.00000</td>")
    says(
        text,
        "<svg",
        ">grad_norm<",
        'id="mesh-picture"',
        "<td>10</td><td>2.87500</td>",
        "&lt;b&gt;",
    )
    says(text, "optimizer.lr</td><td>0.0008 -&gt; 0.125", "dp_shard 2</h1>", "<td>hangs</td><td>1 ")
    says(text, "2.00 GiB")
    assert text.count('class="node"') == 2, "a rank on each of two hosts"
    assert not re.search(r"<(script|link|iframe|img|b>)|\bsrc=|href=\"[^#]|@import", text)
    says(tool("report", run, "--html", run / "absent/a.html", code=2), f"{run}/absent/a.html")


def test_a_chart_rises_with_its_values_and_has_a_gap_where_one_is_not_finite():
    assert chart(np.array([1.0, 2.0, math.nan, 8.0]), 9) == "▁▂ █"
    assert chart(np.arange(100.0), 8) == "▁▂▃▄▅▆▇█" and len({*chart(np.ones(3), 9)}) == 1


def test_a_terminal_without_blocks_has_a_chart_of_other_characters(run, monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    assert main(["top", str(run)]) == 0
    out.seek(0)
    assert re.search(r"loss +3 +#.*_", out.read())
