"""The real command with checkpoints in a bucket: killed and robbed of its folder, restarted, and
refused before any worker starts.
"""

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.jobs import TINY, job
from tests.messages import refused, says
from tests.runs import (
    Run,
    command,
    descendants,
    finish,
    left_over,
    losses,
    run,
    signal_all,
    start,
    wait_for,
)
from titanlite.cli import main
from titanlite.config.load import ConfigError

STEPS = 60
SAVING = [*TINY, "--checkpoint.enable"]
LONG = [*SAVING, "--checkpoint.async_mode=async", "--debug.seed=1"]
LONG += ["--metrics.log_freq=1", f"--training.steps={STEPS}"]
ARGV = [*LONG, "--checkpoint.interval=10"]


def until_saved(process, folder: Path) -> None:
    """Wait until a run has noted that the bucket has step 30."""
    file = folder / ".saved"
    wait_for(file, process, 300)
    while int(file.read_text().split()[0]) < 30:
        assert process.poll() is None, finish(process)
        time.sleep(0.02)


@pytest.fixture
def here(store, tmp_path) -> dict[str, str]:
    return {"NGPU": "2", "XDG_CACHE_HOME": str(tmp_path), **store.environment}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Run:
    return run(ARGV, tmp_path_factory.mktemp("undisturbed"), ranks=2)


@pytest.mark.nightly
def test_a_run_that_is_killed_and_loses_its_folder_goes_on_by_the_same_command(
    url, here, undisturbed, tmp_path
):
    folder, argv = tmp_path / "run", [*ARGV, f"--checkpoint.folder={url}"]
    process = start(argv, folder, **here)
    until_saved(process, folder)
    signal_all(process)
    process.wait()
    shutil.rmtree(folder)
    code, out = finish(start(argv, folder, **here))
    assert code == 0 and losses(folder) == undisturbed.losses
    says(out, "resuming from", f"{url}/step-{STEPS}")
    code, out = finish(start(argv, folder, **here))
    says(out, f"step {STEPS} of {STEPS}", "--checkpoint.folder")
    assert code == 0 and out.count("\n") == 1


@pytest.mark.nightly
def test_a_run_that_copies_its_saves_is_killed_and_loses_its_disk_goes_on_in_the_same_bits(
    url, here, undisturbed, tmp_path
):
    folder, killed = tmp_path / "run", tmp_path / "killed"
    copy = f"titanlite checkpoint cp {{checkpoint}} {url}"
    copy += f" && mkdir {killed} && kill -9 $PPID"  # once: the launcher
    argv = [*LONG, "--checkpoint.interval=20", "--checkpoint.keep_latest_k=0"]
    argv.append(f"--checkpoint.after_save={copy}")
    process, family = start(argv, folder, **here), set[int]()
    while process.poll() is None:
        family |= {*descendants(process.pid)}
        time.sleep(0.1)
    assert killed.exists() and not left_over(family), finish(process)
    shutil.rmtree(folder)
    code, out = command("checkpoint", "cp", url, folder, "--all", **here)
    assert code == 0, out
    code, out = finish(start(argv, folder, **here))
    assert code == 0, out
    after = losses(folder)
    assert 20 < min(after) <= max(after) == STEPS
    assert after == {step: undisturbed.losses[step] for step in after}


@pytest.mark.long
def test_a_rank_that_dies_is_restarted_from_the_bucket(url, here, undisturbed, tmp_path):
    folder = tmp_path / "run"
    process = start([*ARGV, f"--checkpoint.folder={url}"], folder, **here)
    until_saved(process, folder)
    os.kill(max(descendants(process.pid)), signal.SIGKILL)
    code, out = finish(process)
    says(out, f"from {url}/step-")
    assert code == 0 and losses(folder) == undisturbed.losses


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ("checkpoint.folder=s3://nobody/run", "checkpoint.folder: s3://|no such bucket"),
        (
            "training.dataset=tokens --training.dataset_path=URL",
            "training.dataset_path|URL has no manifest.json",
        ),
    ],
)
def test_what_is_wrong_with_a_url_is_one_line_before_anything_starts(
    url, tmp_path, capfd, option, named
):
    argv = [*ARGV, *f"--{option}".replace("URL", url).split(), f"--job.dump_folder={tmp_path}/run"]
    assert main(["train", "--config", "debug.toml", *argv]) == 2
    said = "".join(capfd.readouterr())
    says(said, *named.replace("URL", url).split("|"))
    assert len(said.splitlines()) == 2 and not (tmp_path / "run").exists()


LEGAL = "legal: s3://, gs:// or az://BUCKET/FOLDER"
DATA = "training.dataset_path"


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("job.dump_folder", "s3://bucket/run", "a folder here"),
        ("model.hf_assets_path", "gs://me/model", "a folder here"),
        ("job.dump_folder", "gs://bucket/run", "titanlite checkpoint cp URL FOLDER"),
        ("checkpoint.folder", "s3://", LEGAL),
        ("checkpoint.initial_load_path", "hf://me/model", LEGAL),
        (DATA, "s3://bucket/text", "a folder here"),
        (DATA, "hf://me/x", "legal: a folder here, or s3://"),
        (DATA, "s3://", "legal: a folder here, or s3://"),
    ],
)
def test_a_url_that_cannot_be_there_is_refused_with_what_is_legal(key, value, named):
    argv = [*SAVING, f"--{key}={value}"]
    argv += ["--training.dataset=tokens"] * (key == DATA and "text" not in value)
    with refused(f'{key} = "{value}"', named, kind=ConfigError):
        job(argv, world=1)
