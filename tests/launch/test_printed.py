"""What a run prints is what was reviewed, and its commands run as they were printed, also in a
folder with a blank and an accent in its name.
"""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs import QUIET, TINY
from tests.lanes import sample
from tests.runs import ROOT, command, environment, finish, run, start, wait_for
from titanlite.cli import main
from titanlite.errors import FAILED, REFUSED, command_line

PRINTED = Path(__file__).with_name("printed.txt")
PYTHON = shlex.quote(sys.executable)
FOLDER = "my runs ü"
SAVING = [word for word in TINY if word != "--checkpoint.no_enable"]


def consoles(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield what users see first: each name with all that was printed."""
    injured = ["--model.package=injured", "--lr_scheduler.warmup_steps=0"]
    saving = [*SAVING, *injured, "--checkpoint.interval=2", "--checkpoint.async_mode=disabled"]
    yield "a first run", run(saving, folder / "run", 2).out
    yield "a resumed run", run([*saving, "--training.steps=5"], folder / "run", 2).out
    config = ["train", "--training.stepz=5", "--optimizer.lr=x", "--training.dataset=txt"]
    code, out = command(*config, f"--job.dump_folder={folder / 'none'}")
    assert code == REFUSED and not (folder / "none").exists()
    yield "a refused config", out
    failing = [*TINY, *injured, "--training.steps=9", "--fault.stall_seconds=3"]
    raises, stops = "raise:data:1:6", "stop:backward:1:6"
    out = run(failing, folder / "failed", 2, FAILED, INJURY=raises).out
    assert out.count("Traceback") == 1 and out.splitlines()[-1].startswith("ValueError: ")
    yield "a failed rank", out
    yield "a hang", run(failing, folder / "hung", 2, FAILED, INJURY=stops).out
    yield "a restart", run(saving, folder / "killed", 2, INJURY="kill:backward:1:3").out
    process = start([*saving, "--training.steps=100000"], folder / "stopped", NGPU="2")
    wait_for(folder / "stopped/checkpoint/step-4", process)
    process.send_signal(signal.SIGINT)
    code, out = finish(process)
    assert code == 128 + signal.SIGINT, out
    yield "Ctrl-C", out


def normalized(text: str, folder: Path) -> str:
    """Return each line once, without what depends on time, machine and versions."""
    for place, name in (
        (folder, "FOLDER"),
        (command_line("titanlite"), "titanlite"),
        (ROOT, "ROOT"),
    ):
        text = text.replace(str(place), name)
    text = text.replace(socket.gethostname(), "HOST")
    for pattern, instead in {
        r"(?s)Traceback .*?\n(?=\S)": "Traceback ...\n",
        r"(?m)^    .+:\d+ in .*\n": "",  # a frame
        r"\w+, in \S+:\d+ in \S+": "sleeping, in FILE:N in NAME",
        r"torch \S+,": "torch N,",
        r"(?<=fingerprint )[0-9a-f]{16}": "N",
        r"(?<![A-Za-z\d])\d+(?:[-_.,:]\d+)*(?:e[+-]\d+)?": "N",
        r"[KMGT]iB": "iB",
        r"(?<=\S) {2,}": "  ",
        r"(?m)^step: +": "step: ",  # as wide as the last one
        "step lost": "steps lost",
    }.items():
        text = re.sub(pattern, instead, text)
    return "".join(f"{line}\n" for line in dict.fromkeys(text.splitlines()))


@pytest.mark.parametrize("most", sample(["a first run", "Ctrl-C"], "a first run"))
def test_what_users_see_first_is_printed_txt(tmp_path, most):
    """With TITANLITE_UPDATE=1 the file is written again, and its difference is to be reviewed."""
    found = ""
    for name, out in consoles(tmp_path):
        found += f"= {name}\n{normalized(out, tmp_path)}"
        if name == most:
            break
    if os.environ.get("TITANLITE_UPDATE") == "1":
        PRINTED.write_text(found)
    before, name, rest = PRINTED.read_text().partition(f"= {most}\n")
    expected = before + name + rest.partition("\n= ")[0]
    # Lines of the launcher and of a rank come in the order in which they are seen.
    assert sorted(found.splitlines()) == sorted(expected.splitlines()), found


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> tuple[Path, dict[str, str]]:
    """Return a folder in which a run has ended, and what its last lines say."""
    place = tmp_path_factory.mktemp("a folder é")
    argv = [word for word in SAVING if word != "--metrics.no_enable_tensorboard"]
    ended = run([*argv, "--checkpoint.last_save_in_hf"], place / FOLDER)
    last = ended.out.partition("step 3 reached\n")[2].splitlines()
    return place, dict(line.split(maxsplit=1) for line in last)


def typed(line: str, folder: Path) -> str:
    """Run what a shell makes of a line; return what it prints."""
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        env=environment(NGPU="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def trains(options: str, folder: Path, argv: list[str]) -> None:
    words = " ".join(map(shlex.quote, argv))
    line = f"{PYTHON} -m titanlite train {words} {options} --training.steps 1"
    assert "step 1 reached" in typed(f"{line} --job.dump_folder again", folder)


@pytest.mark.nightly
def test_the_commands_at_the_end_of_a_run(place):
    folder, said = place
    assert "last loss" in typed(said["plot"], folder)
    assert f"{FOLDER}/checkpoint/step-3" in typed(f"{said['generate']} --tokens 3", folder)
    log = folder / "tensorboard.log"
    with log.open("w") as file:
        line = f"exec {said['TensorBoard']} --port 0"
        server = subprocess.Popen(
            ["bash", "-c", line], cwd=folder, env=environment(), stdout=file, stderr=file
        )
    deadline = time.monotonic() + 300
    while "http://" not in (text := log.read_text()) and time.monotonic() < deadline:
        assert server.poll() is None, text
        time.sleep(0.2)
    server.kill()
    server.wait()
    assert "http://" in text


@pytest.mark.nightly
def test_the_options_that_start_from_imported_weights(place):
    folder, _ = place
    source, target = (
        shlex.quote(str(folder / FOLDER / name)) for name in ("checkpoint/hf-step-3", "imported")
    )
    out = typed(f"{PYTHON} -m titanlite checkpoint import {source} {target}", folder)
    (options,) = re.findall("to start from them: (.*)", out)
    trains(options, folder, QUIET)


@pytest.mark.nightly
def test_the_options_that_train_on_prepared_text(place):
    folder, _ = place
    (folder / "some text.txt").write_text("words " * 1000)
    prepare = "data prepare 'some text.txt' --out 'it is $HOME ü' --workers 1"
    out = typed(f"{PYTHON} -m titanlite {prepare}", folder)
    (options,) = re.findall("to train on them: (.*)", out)
    trains(options, folder, TINY)


@pytest.mark.nightly
def test_the_command_for_an_export_that_is_missing(place):
    folder, _ = place
    export = folder / FOLDER / "checkpoint/hf-step-3"
    export.rename(folder / "kept")
    ended = run([*SAVING, "--checkpoint.last_save_in_hf"], folder / FOLDER)
    (line,) = re.findall("its export is missing: (.*)", ended.out)
    typed(line, folder)
    assert (export / "config.json").is_file()


def test_a_tokenizer_is_fetched_into_the_folder_that_was_named(tmp_path, capsys):
    folder = tmp_path / "it is $HOME"
    argv = [*TINY, f"--model.hf_assets_path={folder}", f"--job.dump_folder={tmp_path / 'run'}"]
    assert main(["train", *argv]) == 2
    (line,) = re.findall("To fetch one: (hf .*)", capsys.readouterr().err)
    words = typed(f'hf() {{ printf "%s\\n" "$@"; }}; {line}', tmp_path)
    assert words.splitlines()[-1] == str(folder)
