"""What is printed fits the terminal it is printed on, its width and its encoding; elsewhere nothing
is drawn.
"""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs import TINY
from tests.lanes import sample
from tests.runs import ROOT, environment

POSIX = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
ENCODINGS = [{"PYTHONIOENCODING": "latin-1"}, POSIX]


def on_a_terminal(width: int, *argv: str, stderr: str = "", **environ: str) -> list[str]:
    """Return the lines that a command printed on a terminal, without what has been drawn over."""
    controller, terminal = pty.openpty()
    variables = environment(NGPU="1", TERM="xterm-256color", COLUMNS=str(width), **environ)
    process = subprocess.Popen(
        [sys.executable, "-m", "titanlite", *argv],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env=variables,
    )
    os.close(terminal)
    out = b""
    while True:
        try:
            out += os.read(controller, 65536)
        except OSError:  # the command has closed its side
            break
    os.close(controller)
    process.wait()
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.decode()).replace("\r\n", "\n").split("\n")


def is_typed(line: str) -> bool:
    """Whether a line is a command or a key with its default, which must stay whole to be copied."""
    return line.startswith(("  titanlite ", "  NGPU=", "example: ", "usage: ", "  --"))


@pytest.mark.parametrize("width", sample([40, 60], 40))
@pytest.mark.parametrize("command", ["", "train", "plan"])
def test_a_page_of_help_is_as_wide_as_the_terminal(command, width):
    lines = on_a_terminal(width, *filter(None, [command, "--help"]))
    assert len(lines) > 10
    whole = [line for line in lines if len(line) > width and not is_typed(line)]
    assert not [line for line in whole if len(line.split()) > 1], "one long word is not broken"
    assert max(len(line) for line in lines if not is_typed(line)) >= width - 12, "and no narrower"


@pytest.mark.exhaustive
def test_the_lines_of_a_start_break_between_words(tmp_path):
    argv = [*TINY, "--training.steps=1", f"--job.dump_folder={tmp_path}"]
    lines = [line.rpartition("\r")[2] for line in on_a_terminal(40, "train", *argv)]
    log = (tmp_path / "logs/rank-0.log").read_text()
    begin = next(n for n, line in enumerate(lines) if line.startswith("model "))
    end = next(n for n, line in enumerate(lines) if line.startswith("seed "))
    words = " ".join(lines[begin:end]).split()
    assert words == log[log.index("model ") : log.index("seed ")].split()
    assert max(len(line.rstrip()) for line in lines[begin:end]) <= 40


def test_a_list_in_an_error_breaks_at_the_edge_of_the_terminal_and_commands_stay_whole(tmp_path):
    lines = on_a_terminal(60, "train", "--config", "none.toml")
    assert (
        "      no such file, here or in train_configs/ (debug.toml," in lines
        and max(map(len, lines)) <= 60
    )
    assert sum("llama" in line for line in lines) > 1
    (tmp_path / "pyarrow.py").write_text("raise ImportError")
    (tmp_path / "some.parquet").write_bytes(b"PAR1")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    text = str(tmp_path / "some.parquet")
    lines = on_a_terminal(60, "data", "prepare", text, "--out", "shards", PYTHONPATH=path)
    assert f"  {sys.executable} -m pip install pyarrow" in lines, lines


def test_the_last_column_of_a_table_breaks_at_the_edge_of_the_terminal():
    lines = on_a_terminal(60)
    start = lines.index("  config      print the resolved config, its mesh, or the")
    assert lines[start + 1] == "              schema of all configs"


@pytest.mark.exhaustive
def test_the_line_of_progress_fits_a_narrow_terminal(tmp_path):
    argv = [*TINY, "--training.steps=40", f"--job.dump_folder={tmp_path}"]
    lines = [part for line in on_a_terminal(60, "train", *argv) for part in line.split("\r")]
    live = [line.rstrip() for line in lines if re.match(r"(step \d+/|starting)", line)]
    assert max(map(len, live)) <= 60 and any(
        re.fullmatch(r"step \d+/40 [━╸╺]{24} eta .*", line) for line in live
    ), live
    assert not [line for line in live if "tokens/s" in line], "which the line of the step has"


def without_a_terminal(*argv: str, **environ: str) -> subprocess.CompletedProcess:
    variables = environment(NGPU="1", **environ)
    return subprocess.run(
        [sys.executable, "-m", "titanlite", *argv], env=variables, capture_output=True, cwd=ROOT
    )


@pytest.mark.parametrize("encoding", ENCODINGS, ids=lambda environ: next(iter(environ)))
@pytest.mark.parametrize("argv", sample(["", "train --help", "plan --help"], "plan --help"))
def test_a_terminal_that_lacks_characters_gets_question_marks(argv, encoding):
    done = without_a_terminal(*argv.split(), **encoding)
    assert done.returncode == 0 and done.stderr == b"" and b"?" in done.stdout


@pytest.mark.parametrize(
    "encoding", sample(ENCODINGS, long=ENCODINGS[:1]), ids=lambda environ: next(iter(environ))
)
def test_a_run_on_a_terminal_that_lacks_characters(encoding, tmp_path):
    (tmp_path / "own.toml").write_text('[job]\ndescription = "r…n"\n', encoding="utf-8")
    argv = [
        "--config",
        "debug.toml",
        str(tmp_path / "own.toml"),
        *TINY,
        f"--job.dump_folder={tmp_path / 'run'}",
    ]
    done = without_a_terminal("train", *argv, "--training.steps=2", **encoding)
    assert done.returncode == 0 and b"step 2 reached" in done.stdout and b"r?n" in done.stdout, done
    assert b"Traceback" not in done.stdout + done.stderr


def test_no_progress_is_drawn_where_there_is_no_terminal(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("words " * 1000)
    done = without_a_terminal(
        "data", "prepare", str(text), "--out", str(tmp_path / "out"), "--workers", "1"
    )
    assert (
        done.returncode == 0
        and done.stderr == b""
        and Path(tmp_path / "out/manifest.json").exists()
    ), done
