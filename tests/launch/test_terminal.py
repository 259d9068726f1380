"""What is printed fits the terminal it is printed on, its width, colors and encoding; other outputs
get plain lines, and nothing is drawn.
"""

import io
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs import TINY
from tests.messages import refused, says
from tests.runs import ROOT, environment, finish, popen, start
from titanlite.cli import main
from titanlite.config.job import job_from
from titanlite.config.load import SHIPPED, load_config, parse_command_line
from titanlite.fault.inspection import wait_until
from titanlite.launch.terminal import NOTICES, Follower, Terminal, note
from titanlite.observe.console import colored, open_log, rank_log, shortened
from titanlite.runtime.cluster import shown_ranks

LINE = (
    "step:  1  loss:  8.04034  grad_norm:  1.3470  "
    "memory:  1.02GiB(1.08%)  tps: 27,483  tflops: 1.97"
)


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def screen(monkeypatch: pytest.MonkeyPatch, columns: int = 160) -> Screen:
    """Let the standard output of this process be a terminal."""
    shown = Screen()
    monkeypatch.setattr(sys, "stdout", shown)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm-256color")
    return shown


@pytest.fixture
def width(monkeypatch) -> int:
    monkeypatch.setenv("COLUMNS", "60")
    return 60


# ---------------------------------------------------------------- the width


TYPED = "  titanlite ", "  NGPU=", "example: ", "usage: ", "  --"
"""How commands and keys with defaults begin, which must stay whole to be copied."""


def printed(argv: list[str], **environ: str) -> str:
    """Return what a process without a terminal prints, which is no error."""
    options = {"stdout": subprocess.PIPE, "errors": "replace", "env": environment(**environ)}
    code, out = finish(popen(["titanlite", *argv], "its width or encoding is read", **options))
    assert code == 0 and "Traceback" not in out, out
    return out


@pytest.mark.parametrize("command", ["", "train", "plan"])
def test_a_page_of_help_is_as_wide_as_the_terminal(command, width, capsys):
    if command:
        main([command, "--help"])
        page = capsys.readouterr().out
    else:  # this process has made its table of commands
        page = printed([], COLUMNS=str(width))
        table = page[page.index("\n  config ") :].splitlines()
        column = table[1].index("print")
        assert table[2].startswith(f"{' ' * column}schema"), "its last column breaks"
    lines = [line for line in page.splitlines() if not line.startswith(TYPED)]
    assert len(lines) > 10
    whole = [line for line in lines if len(line) > width]
    assert not [line for line in whole if len(line.split()) > 1], "one long word is not broken"
    assert max(map(len, lines)) >= width - 12, "and no narrower"


def test_a_list_in_an_error_breaks_at_the_edge_of_the_terminal_and_commands_stay_whole(
    width, tmp_path, capsys, monkeypatch
):
    main(["train", "--config", "none.toml"])
    lines = capsys.readouterr().err.splitlines()
    says("\n".join(lines), "none.toml", "(debug.toml,")
    assert max(map(len, lines)) <= width
    assert sum("llama" in line for line in lines) > 1
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "some.parquet").write_bytes(b"PAR1")
    main(["data", "prepare", f"{tmp_path}/some.parquet", "--out", f"{tmp_path}/shards"])
    assert f"  {sys.executable} -m pip install pyarrow" in capsys.readouterr().err.splitlines()


def test_a_step_is_one_row_of_a_narrow_terminal_and_whole_elsewhere(tmp_path, capsys, monkeypatch):
    log, shown = tmp_path / "log", []
    log.write_text(f"{LINE}\nvalidation at step 1: {'x' * 60}\n")
    for columns, ranks, terminal in ((60, 1, True), (50, 2, True), (60, 1, False)):
        with monkeypatch.context() as patch:
            if terminal:
                shown.append(screen(patch, columns))
            with Terminal(dict.fromkeys(range(ranks), log), tmp_path / "metrics", 9, color=False):
                pass
    one, two = (each.getvalue() for each in shown)
    says(one, "grad_norm:  1.3470\n", "x" * 60)
    says(two, "[rank 1] step:  1  loss:  8.04034\n")
    assert capsys.readouterr().out.startswith(f"{LINE}\n")
    assert shortened(LINE, 1000) == LINE and shortened(LINE, 3) == "step:  1  loss:  8.04034"


def read(terminal: int) -> str:
    """Return what is printed on a pseudo-terminal, until all have closed it."""
    out = b""
    while True:
        try:
            out += os.read(terminal, 65536)
        except OSError:
            os.close(terminal)
            return out.decode()


@pytest.mark.long
def test_a_run_on_a_terminal_shows_progress_and_colors_and_its_log_has_none(tmp_path):
    controller, terminal = pty.openpty()
    environ = {"NGPU": "1", "TERM": "xterm-256color"}
    process = start([*TINY, "--training.steps=40"], tmp_path, out=terminal, **environ)
    os.close(terminal)
    out = read(controller)
    assert process.wait() == 0, out
    says(out, "\033[32mloss:", "starting", "/40 ", " eta ")
    assert "\033[" not in (tmp_path / "logs/rank-0.log").read_text()


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


# ---------------------------------------------------------------- what is shown


@pytest.mark.parametrize("columns", [160, 50])
def test_progress_goes_on_after_a_loss_that_was_not_finite_and_is_no_wider_than_the_terminal(
    tmp_path, monkeypatch, columns
):
    shown = screen(monkeypatch, columns)
    record = {"step": 3, "loss": None, "step_seconds": 1, "tps": 5}
    (tmp_path / "metrics").write_text(json.dumps(record) + "\n")
    (tmp_path / "log").write_text(f"mesh       {'words ' * 20}\n")
    with Terminal({0: tmp_path / "log"}, tmp_path / "metrics", 9, color=False):
        wait_until(lambda: "step 3/9" in shown.getvalue(), 20)
    says(shown.getvalue(), "step 3/9", "not finite")
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\n", shown.getvalue())
    assert ("5 tokens/s" in plain) == (columns == 160)
    assert max(len(line.rstrip()) for line in re.split(r"[\r\n]+", plain)) <= columns
    assert plain.split().count("words") == 20, "lines break between words"


TIMED = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d "


@pytest.mark.parametrize("launched", [True, False])
def test_log_files_have_the_time_of_each_line_and_the_console_has_none(tmp_path, capsys, launched):
    text, file = f"mesh       two ranks\n\n{LINE}\n", rank_log(tmp_path, 0)
    open_log(tmp_path, 0, launched, shown=True).info(text.removesuffix("\n"))
    out = capsys.readouterr().out
    if launched:  # the launcher makes the file of what a rank prints
        file.parent.mkdir()
        file.write_text(out)
        with Terminal({0: file}, tmp_path / "metrics.jsonl", 9, color=False):
            pass
        out = capsys.readouterr().out
    assert out == text
    note(file.parent, LINE)
    for written, lines in ((file, text), (file.with_name(NOTICES), f"{LINE}\n")):
        assert re.findall(f"(?m)^{TIMED}(.*)$", written.read_text()) == lines.splitlines()


@pytest.mark.parametrize("color", [True, False])
def test_disable_color_printing_shows_plain_lines(tmp_path, monkeypatch, color):
    shown = screen(monkeypatch)
    (tmp_path / "log").write_text("step:  1  loss:  8.04034\n")
    with Terminal({0: tmp_path / "log"}, tmp_path / "metrics", 9, color=color):
        pass
    assert ("\033[32mloss:" in shown.getvalue()) == color
    plain = "validation at step 5: loss 3"
    assert colored(plain) == plain


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
    with refused("LOG_RANK=all"):
        shown_ranks({"LOG_RANK": "all"})


def test_keys_without_effect_are_told_if_the_user_set_them_and_config_lists_all(
    tmp_path, monkeypatch, capsys
):
    def without_effect(*argv: str) -> str:
        loaded = load_config(parse_command_line([*argv], {}))
        return job_from(loaded, world=1, training=True).no_effect_of(loaded.given)

    monkeypatch.chdir(tmp_path)
    own = "[validation]\nenable = false\nsteps = 7\n[checkpoint]\nenable = false\n"
    Path("own.toml").write_text(own)
    files = ["--config", "debug.toml", "own.toml"]
    line = without_effect(*files, "--generate.no_at_end", "--generate.tokens=3")
    says(line, "validation.enable: validation.steps;", "generate.at_end: generate.tokens")
    assert "validation.freq" not in line and "checkpoint" not in line
    assert main(["config", *files]) == 0
    (line,) = re.findall("(?m)^# no effect .*", capsys.readouterr().out)
    says(line, "validation.freq", "checkpoint.interval")
    Path("debug.toml").write_text((SHIPPED / "debug.toml").read_text())
    assert "validation.freq" in without_effect("--validation.no_enable"), "one's own copy"


# ---------------------------------------------------------------- the encoding

POSIX = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
LATIN = {"PYTHONIOENCODING": "latin-1"}


def test_a_terminal_that_lacks_characters_gets_question_marks():
    assert "?" in printed(["plan", "--help"], **POSIX)


@pytest.mark.long
def test_a_run_on_a_terminal_that_lacks_characters(tmp_path):
    own = tmp_path / "own.toml"
    own.write_text('[job]\ndescription = "r…n"\n', encoding="utf-8")
    argv = ["--config", "debug.toml", str(own), *TINY, f"--job.dump_folder={tmp_path}/run"]
    out = printed(["train", *argv], NGPU="1", **LATIN)
    assert "step 3 reached" in out and "r?n" in out
