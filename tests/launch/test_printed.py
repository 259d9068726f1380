"""Every command that titanlite prints runs as it was printed, in a folder with a blank and an
accent in its name.
"""

import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.jobs import TINY
from tests.runs import environment, train
from titanlite.cli import main

PYTHON = shlex.quote(sys.executable)
FOLDER = "my runs ü"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> tuple[Path, dict[str, str]]:
    """Return a folder in which a run has ended, and what its last lines say."""
    place = tmp_path_factory.mktemp("a folder é")
    argv = [
        *TINY,
        "--checkpoint.enable",
        "--metrics.enable_tensorboard",
        "--checkpoint.last_save_in_hf",
    ]
    argv.remove("--checkpoint.no_enable")
    code, out = train(
        [word for word in argv if word != "--metrics.no_enable_tensorboard"],
        place / FOLDER,
        NGPU="1",
    )
    assert code == 0, out
    return place, dict(
        line.split(maxsplit=1) for line in out.partition("step 3 reached\n")[2].splitlines()
    )


def quoted(text: object) -> str:
    return shlex.quote(str(text))


def typed(command: str, folder: Path, **options: str) -> subprocess.CompletedProcess:
    """Run what a shell makes of a command."""
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment(NGPU="1", **options),
        capture_output=True,
        text=True,
    )


@pytest.mark.long
def test_the_commands_at_the_end_of_a_run(place):
    folder, said = place
    done = typed(said["plot"], folder)
    assert done.returncode == 0 and "wrote " in done.stdout, done
    done = typed(f"{said['generate']} --tokens 3", folder)
    assert done.returncode == 0 and f"{FOLDER}/checkpoint/step-3" in done.stderr, done
    command = said["TensorBoard"]
    with (folder / "tensorboard.log").open("w") as log:
        server = subprocess.Popen(
            ["bash", "-c", f"exec {command} --port 0"],
            cwd=folder,
            env=environment(),
            stdout=log,
            stderr=log,
        )
    deadline = time.monotonic() + 300
    while (
        "http://" not in (text := (folder / "tensorboard.log").read_text())
        and time.monotonic() < deadline
    ):
        assert server.poll() is None, text
        time.sleep(0.2)
    server.kill()
    server.wait()
    assert "http://" in text


@pytest.mark.exhaustive
def test_the_options_that_start_from_imported_weights(place):
    folder, _ = place
    source, target = folder / FOLDER / "checkpoint/hf-step-3", folder / FOLDER / "imported"
    done = typed(
        f"{PYTHON} -m titanlite checkpoint import {quoted(source)} {quoted(target)}", folder
    )
    assert done.returncode == 0, done
    (options,) = re.findall("to start from them: (.*)", done.stdout)
    run = (
        f"{PYTHON} -m titanlite train {options} {' '.join(map(quoted, TINY[:15]))} "
        "--training.steps 1"
    )
    done = typed(f"{run} --job.dump_folder again", folder)
    assert done.returncode == 0 and "step 1 reached" in done.stdout, done


@pytest.mark.long
def test_the_options_that_train_on_prepared_text(place):
    folder, _ = place
    (folder / "some text.txt").write_text("words " * 1000)
    done = typed(
        f"{PYTHON} -m titanlite data prepare 'some text.txt' --out 'it is $HOME ü' --workers 1",
        folder,
    )
    (options,) = re.findall("to train on them: (.*)", done.stdout)
    done = typed(
        f"{PYTHON} -m titanlite train {' '.join(map(quoted, TINY))} {options} --training.steps 1",
        folder,
    )
    assert done.returncode == 0 and "step 1 reached" in done.stdout, done


@pytest.mark.exhaustive
def test_the_command_for_an_export_that_is_missing(place):
    folder, _ = place
    export = folder / FOLDER / "checkpoint/hf-step-3"
    export.rename(folder / "kept")
    argv = ["--checkpoint.enable", "--checkpoint.last_save_in_hf"]
    code, out = train(
        [*(word for word in TINY if word != "--checkpoint.no_enable"), *argv], folder / FOLDER
    )
    (command,) = re.findall("its export is missing: (.*)", out)
    done = typed(command, folder)
    assert code == 0 and done.returncode == 0 and (export / "config.json").is_file(), done


def test_a_tokenizer_is_fetched_into_the_folder_that_was_named(tmp_path, capsys):
    folder = tmp_path / "it is $HOME"
    assert (
        main(
            [
                "train",
                *TINY,
                f"--model.hf_assets_path={folder}",
                f"--job.dump_folder={tmp_path / 'run'}",
            ]
        )
        == 2
    )
    (command,) = re.findall("To fetch one: (hf .*)", capsys.readouterr().err)
    done = subprocess.run(
        ["bash", "-c", f'hf() {{ printf "%s\\n" "$@"; }}; {command}'],
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines()[-1] == str(folder)
