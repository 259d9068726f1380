"""A terminal shows one live line of progress and colors; other outputs get plain lines."""

import io
import json
import os
import pty
import re
import subprocess
import sys
import time

import pytest

from tests.jobs import TINY
from tests.runs import ROOT, environment, train
from titanlite.cli import main
from titanlite.config.job import job_from
from titanlite.config.load import SHIPPED, load, parse_command_line
from titanlite.errors import UserError
from titanlite.launch.terminal import Follower, Terminal, known_facts
from titanlite.observe.console import colored, shortened
from titanlite.runtime.cluster import shown_ranks


def on_a_terminal(*command: str, width: int = 160) -> str:
    """Run a command on a pseudo-terminal and return its output."""
    controller, terminal = pty.openpty()
    environ = environment(NGPU="1", TERM="xterm-256color", COLUMNS=str(width))
    process = subprocess.Popen(
        [sys.executable, *command],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env=environ,
        cwd=ROOT,
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


@pytest.mark.long
def test_a_terminal_shows_progress_and_colors(tmp_path):
    argv = [*TINY, "--training.steps=40", f"--job.dump_folder={tmp_path}"]
    out = on_a_terminal("-m", "titanlite", "train", *argv)
    assert (
        "\033[32mloss:" in out
        and "starting" in out
        and "tokens/s per device" in out
        and "/40" in out
    )
    assert "\033[" not in (tmp_path / "logs/rank-0.log").read_text()


def test_a_step_is_one_row_of_a_narrow_terminal_and_whole_elsewhere(tmp_path, capsys, monkeypatch):
    line = (
        "step:  1  loss:  8.04034  grad_norm:  1.3470  "
        "memory:  1.02GiB(1.08%)  tps: 27,483  tflops: 1.97"
    )
    (tmp_path / "log").write_text(f"{line}\nvalidation at step 1: {'x' * 60}\n")
    code = (
        "import sys, pathlib; from titanlite.launch.terminal import Terminal as T; "
        "f = pathlib.Path(sys.argv[1]); "
        "t = T({n: f / 'log' for n in range(int(sys.argv[2]))}, f / 'metrics', 9, color=False)\n"
        "with t: pass"
    )
    shown = {
        key: on_a_terminal("-c", code, str(tmp_path), str(key[1]), width=key[0])
        for key in [(60, 1), (50, 2)]
    }
    assert "grad_norm:  1.3470\r\n" in shown[60, 1] and "x" * 60 in shown[60, 1]
    assert "[rank 1] step:  1  loss:  8.04034\r\n" in shown[50, 2]
    assert shortened(line, 1000) == line and shortened(line, 3) == "step:  1  loss:  8.04034"
    monkeypatch.setenv("COLUMNS", "60")
    with Terminal({0: tmp_path / "log"}, tmp_path / "metrics", 9, color=False):
        pass
    assert capsys.readouterr().out.startswith(f"{line}\n")


@pytest.mark.parametrize("color", [True, False])
def test_disable_color_printing_shows_plain_lines(tmp_path, color):
    (tmp_path / "log").write_text("step:  1  loss:  8.04034\n")
    code = (
        "import sys, pathlib; from titanlite.launch.terminal import Terminal as T; "
        "f = pathlib.Path(sys.argv[1]); "
        f"t = T({{0: f / 'log'}}, f / 'metrics', 9, color={color})\nwith t: pass"
    )
    assert ("\033[32mloss:" in on_a_terminal("-c", code, str(tmp_path))) == color


def test_progress_goes_on_after_a_loss_that_was_not_finite(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    (tmp_path / "metrics").write_text(
        json.dumps({"step": 3, "loss": None, "step_seconds": 1, "tps": 5}) + "\n"
    )
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
    """Where a hangup is ignored, writing to a terminal that is gone is an error, of which nobody
    need be told.
    """
    controller, terminal = pty.openpty()
    code = (
        "import sys, time, pathlib; from titanlite.launch.terminal import Terminal; "
        "f = pathlib.Path(sys.argv[1])"
        "\nwith Terminal({0: f / 'log'}, f / 'metrics', 9, color=True):"
        "\n    while not (f / 'log').exists() and time.process_time() < 20: time.sleep(0.01)"
        "\nprint('the summary')"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    process = subprocess.Popen(
        command, stdout=terminal, stderr=subprocess.PIPE, env=environment(), cwd=ROOT
    )
    os.close(terminal)
    assert os.read(controller, 1), "the live line has started"
    os.close(controller)
    (tmp_path / "log").write_text("step:  1\n")
    assert process.communicate() == (None, b"") and process.returncode == 0


BANNER = (
    "titanlite  0.1.0\nmodel      llama3\nmesh       dp_shard 2\n"
    "lr_scheduler.warmup_steps is long\n"
)


def test_of_facts_that_the_last_start_logged_too_only_the_names_are_shown(tmp_path, capsys):
    planned = ["titanlite: planned peak 2 GiB", "titanlite: planned communication: none"]
    (tmp_path / "before").mkdir()
    (tmp_path / "before/rank-0.log").write_text(f"{BANNER}step:  1\nmesh       dp_shard 4\n")
    (tmp_path / "before/launcher.log").write_text(
        planned[0].replace("2", "1") + f"\n{planned[1]}\n"
    )
    log = tmp_path / "rank-0.log"
    log.write_text(BANNER.replace("dp_shard 2", "dp_shard 4"))
    notices = [planned]
    known = known_facts(tmp_path / "before", [0])
    with Terminal(
        {0: log}, tmp_path / "metrics", 9, False, lambda: notices.pop() if notices else [], known
    ):
        while notices:
            time.sleep(0.01)
        with log.open("a") as file:
            file.write("step:  1\nmodel      llama3\n")
    assert capsys.readouterr().out.splitlines() == [
        planned[0],
        "mesh       dp_shard 4",
        "lr_scheduler.warmup_steps is long",
        f"unchanged since the last start: plan, titanlite, model (in {tmp_path})",
        "step:  1",
        "model      llama3",
    ]
    assert (tmp_path / "launcher.log").read_text().splitlines() == planned


@pytest.mark.exhaustive
def test_a_second_start_is_short_and_its_log_has_all(tmp_path):
    argv = [word for word in TINY if word != "--checkpoint.no_enable"]
    first = train([*argv, "--training.steps=2"], tmp_path, NGPU="2")[1]
    full = (tmp_path / "logs/rank-0.log").read_text()
    second = train([*argv, "--training.steps=3"], tmp_path, NGPU="2")[1]
    heads = [out.partition("\nstep:")[0].splitlines() for out in (first, second)]
    (line,) = [line for line in heads[1] if line.startswith("unchanged since the last start: ")]
    assert {"model", "mesh", "data", "optimizer", "seed"} <= set(re.findall(r"[a-z]+", line))
    assert len(heads[1]) <= len(heads[0]) - 8 and not [
        line for line in heads[1] if line.startswith("model ")
    ]
    (batch,) = [line for line in heads[1] if line.startswith("batch ")]
    assert batch not in heads[0], "what changed is shown"
    logged = (tmp_path / "logs/rank-0.log").read_text().splitlines()
    facts = [
        line
        for line in full.partition("\nstep:")[0].splitlines()
        if re.match(r"(model|mesh|data|seed) ", line)
    ]
    assert len(facts) == 4 and {*facts} <= {*logged}


def test_keys_without_effect_are_told_if_the_user_set_them_and_config_lists_all(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    own = "[validation]\nenable = false\nsteps = 7\n[checkpoint]\nenable = false\n"
    (tmp_path / "own.toml").write_text(own)
    loaded = load(
        parse_command_line(
            ["--config", "debug.toml", "own.toml", "--generate.no_at_end", "--generate.tokens=3"],
            {},
        )
    )
    job = job_from(loaded, world=1, training=True)
    assert job.no_effect_of(loaded.given) == (
        "no effect without validation.enable: validation.steps; "
        "without generate.at_end: generate.tokens"
    )
    assert main(["config", "--config", "debug.toml", "own.toml"]) == 0
    line = next(
        line for line in capsys.readouterr().out.splitlines() if line.startswith("# no effect")
    )
    assert "validation.freq" in line and "checkpoint.interval" in line
    (tmp_path / "debug.toml").write_text((SHIPPED / "debug.toml").read_text())
    loaded = load(parse_command_line(["--validation.no_enable"], {}))
    assert "validation.freq" in job_from(loaded, world=1, training=True).no_effect_of(
        loaded.given
    ), "one's own copy"


@pytest.mark.exhaustive
def test_the_start_names_only_what_the_user_set_without_effect(tmp_path):
    code, out = train([*TINY, "--training.steps=1", "--generate.tokens=3"], tmp_path, NGPU="1")
    assert code == 0 and "validation.freq" not in out, out
    assert out.count("no effect") == 1 and "no effect without generate.at_end: " in out
    assert "validation.freq" in (tmp_path / "logs/rank-0.log").read_text()
