"""A terminal shows one live line of progress and colors; other outputs get plain lines."""

import io
import json
import os
import pty
import subprocess
import sys
import time

import pytest

from tests.jobs import TINY
from tests.launch.run import ROOT, environment
from titanlite.errors import UserError
from titanlite.launch.terminal import Follower, Terminal
from titanlite.observe.console import colored
from titanlite.runtime.cluster import shown_ranks


def on_a_terminal(*command: str) -> str:
    """Run a command on a pseudo-terminal and return its output."""
    controller, terminal = pty.openpty()
    environ = environment(NGPU="1", TERM="xterm-256color", COLUMNS="160")
    process = subprocess.Popen(
        [sys.executable, *command], stdin=terminal, stdout=terminal, stderr=terminal, env=environ, cwd=ROOT
    )
    os.close(terminal)
    out = b""
    while True:
        try:
            chunk = os.read(controller, 65536)
        except OSError:  # the command has closed its side
            break
        out += chunk
    os.close(controller)
    assert process.wait() == 0, out.decode()
    return out.decode()


def test_a_terminal_shows_progress_and_colors(tmp_path):
    argv = [*TINY, "--training.steps=40", f"--job.dump_folder={tmp_path}"]
    out = on_a_terminal("-m", "titanlite", "train", *argv)
    assert "\033[32mloss:" in out and "starting" in out and "tokens/s per device" in out and "/40" in out
    assert "\033[" not in (tmp_path / "logs/rank-0.log").read_text()


@pytest.mark.parametrize("color", [True, False])
def test_disable_color_printing_shows_plain_lines(tmp_path, color):
    (tmp_path / "log").write_text("step:  1  loss:  8.04034\n")
    code = (
        "import sys, pathlib; from titanlite.launch.terminal import Terminal as T; f = pathlib.Path(sys.argv[1]); "
        f"t = T({{0: f / 'log'}}, f / 'metrics', 9, color={color})\nwith t: pass"
    )
    assert ("\033[32mloss:" in on_a_terminal("-c", code, str(tmp_path))) == color


def test_progress_goes_on_after_a_loss_that_was_not_finite(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    (tmp_path / "metrics").write_text(json.dumps({"step": 3, "loss": None, "step_seconds": 1, "tps": 5}) + "\n")
    shown, deadline = sys.stdout, time.monotonic() + 20
    with Terminal({}, tmp_path / "metrics", 9, color=False):
        while "loss not finite" not in shown.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
    assert "step 3/9" in shown.getvalue() and "loss not finite" in shown.getvalue()


def test_coloring_keeps_the_text():
    line = "step:  1  loss:  8.04034  mfu: n/a"
    in_color = colored(line)
    assert in_color != line and "\033[31mstep:  1\033[0m" in in_color
    assert colored("validation at step 5: loss 3") == "validation at step 5: loss 3"


def test_a_follower_returns_complete_lines_only(tmp_path):
    path = tmp_path / "log"
    follower = Follower(path)
    assert follower.lines() == []
    path.write_text("one\ntwo")
    assert follower.lines() == ["one"]
    with path.open("a") as file:
        file.write("!\nthr")
    assert follower.lines() == ["two!"]
    assert follower.lines(last=True) == ["thr"]


def test_log_rank_may_list_several():
    assert shown_ranks({}) == {0} and shown_ranks({"LOG_RANK": "1,3"}) == {1, 3}
    with pytest.raises(UserError, match="LOG_RANK=all must be a rank"):
        shown_ranks({"LOG_RANK": "all"})


def test_a_run_outlives_its_terminal(tmp_path):
    """Where a hangup is ignored, writing to a terminal that is gone is an error, of which nobody need be told."""
    controller, terminal = pty.openpty()
    code = (
        "import sys, time, pathlib; from titanlite.launch.terminal import Terminal; f = pathlib.Path(sys.argv[1])"
        "\nwith Terminal({0: f / 'log'}, f / 'metrics', 9, color=True):"
        "\n    while not (f / 'log').exists() and time.process_time() < 20: time.sleep(0.01)"
        "\nprint('the summary')"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    process = subprocess.Popen(command, stdout=terminal, stderr=subprocess.PIPE, env=environment(), cwd=ROOT)
    os.close(terminal)
    assert os.read(controller, 1), "the live line has started"
    os.close(controller)
    (tmp_path / "log").write_text("step:  1\n")
    assert process.communicate() == (None, b"") and process.returncode == 0
