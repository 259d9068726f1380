"""The real command with a mirror: killed and robbed of its folder, stopped beside a slow store, and
refused before any worker starts.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.jobs import TINY, job
from tests.lanes import sample
from tests.messages import refused, says
from tests.runs import Run, descendants, finish, losses, run, start
from titanlite.cli import main
from titanlite.config.load import ConfigError
from titanlite.launch.preflight import _check_mirror
from titanlite.runtime.bucket import place
from titanlite.runtime.store import list_folder

STEPS = 120
SAVING = [*TINY, "--checkpoint.enable"]
ARGV = [*SAVING, "--checkpoint.interval=10", "--checkpoint.async_mode=async", "--debug.seed=1"]
ARGV += ["--metrics.log_freq=1", f"--training.steps={STEPS}"]
NOTED = {"mirror": "checkpoint/mirrored", "folder": ".saved"}
"""The files with the newest step in a store."""


def until(process, file: Path, least: int) -> None:
    """Wait until a file has a number that is large enough."""
    deadline = time.monotonic() + 300
    while not file.exists() or int(file.read_text()) < least:
        assert time.monotonic() < deadline and process.poll() is None, finish(process)
        time.sleep(0.02)


@pytest.fixture
def here(store, tmp_path) -> dict[str, str]:
    return {"NGPU": "2", "XDG_CACHE_HOME": str(tmp_path), **store.environment}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Run:
    return run(ARGV, tmp_path_factory.mktemp("undisturbed"), ranks=2)


@pytest.mark.long
@pytest.mark.parametrize("key", ["mirror", "folder"])
def test_a_run_that_is_killed_and_loses_its_folder_goes_on_by_the_same_command(
    url, proxy, here, undisturbed, tmp_path, key
):
    stored = list[str]()

    def note(method: str, path: str) -> None:
        if method == "PUT":
            stored.append(path.partition("?")[0].rpartition("/")[2])

    proxy.rule = note
    folder, argv = tmp_path / "run", [*ARGV, f"--checkpoint.{key}={url}"]
    process = start(argv, folder, **here)
    until(process, folder / NOTED[key], 30)
    assert key == "folder" or stored.index("metrics.jsonl") < stored.index("manifest.json")
    for pid in [process.pid, *descendants(process.pid)]:
        os.kill(pid, signal.SIGKILL)
    process.wait()
    shutil.rmtree(folder)
    code, out = finish(start(argv, folder, **here))
    assert code == 0 and losses(folder) == undisturbed.losses
    if key == "mirror":
        says(out, "fetched step", f"step-{STEPS} and in {url}")
        return
    says(out, "resuming from", "run.lock", "30 s", f"{url}/step-{STEPS}")
    code, out = finish(start(argv, folder, **here))
    says(out, f"step {STEPS} of {STEPS}", "--checkpoint.folder")
    assert code == 0 and out.count("\n") == 1


@pytest.mark.long
def test_a_rank_that_dies_is_restarted_from_the_bucket_without_waiting(
    url, here, undisturbed, tmp_path
):
    folder = tmp_path / "run"
    process = start([*ARGV, f"--checkpoint.folder={url}"], folder, **here)
    until(process, folder / NOTED["folder"], 30)
    os.kill(max(descendants(process.pid)), signal.SIGKILL)
    code, out = finish(process)
    says(out, f"from {url}/step-")
    assert code == 0 and "30 s" not in out and losses(folder) == undisturbed.losses


@pytest.mark.long
def test_a_stop_request_waits_for_a_slow_mirror_no_longer_than_the_grace(
    url, proxy, here, tmp_path
):
    folder, argv = tmp_path / "run", [*ARGV, f"--checkpoint.mirror={url}"]
    argv += ["--training.steps=100000", "--fault.grace_seconds=8"]

    def last_line(least: int, rate: int) -> str:
        """Train until a step is mirrored, then stop with so many bytes a second."""
        proxy.rule = lambda method, path: None
        process = start(argv, folder, **here)
        until(process, folder / NOTED["mirror"], least)
        proxy.rule = lambda method, path: {"rate": rate} if rate and method == "PUT" else None
        process.send_signal(signal.SIGTERM)
        code, out = finish(process)
        assert code == 75
        return out.strip().splitlines()[-1]

    behind = last_line(10, rate=2000)
    says(behind, f"{url} is behind")
    says(last_line(int(behind.rpartition(" ")[2]) + 1, rate=0), f" and in {url}")


@pytest.mark.long
def test_the_runs_of_a_sweep_have_mirrors_of_their_own(url, here, tmp_path):
    argv = [*SAVING, f"--checkpoint.mirror={url}", "--sweep=optimizer.lr=1e-3,2e-3"]
    code, out = finish(start(argv, tmp_path, **here))
    assert code == 0 and "already at" not in out
    assert list_folder(place(url)).keys() == {"optimizer.lr=1e-3", "optimizer.lr=2e-3"}


def test_the_launcher_checks_a_mirror_in_a_process_of_its_own(url, proxy, tmp_path):
    argv = [*SAVING, f"--job.dump_folder={tmp_path}"]
    _check_mirror(job([*argv, f"--checkpoint.mirror={url}"], world=1).config)
    assert {method for method, _ in proxy.log} == {"GET", "PUT", "POST"}  # list, write, delete


@pytest.mark.parametrize("case", sample(["no bucket", "read only"], "no bucket"))
def test_what_is_wrong_with_a_mirror_is_one_line_before_anything_starts(
    case, url, proxy, tmp_path, capfd
):
    wrong, named = "s3://nobody/run", "no such bucket"
    if case == "read only":
        wrong, named = url, "asked to write"
        proxy.rule = lambda method, path: {"status": 403} if method == "PUT" else None
    argv = [*ARGV, f"--checkpoint.mirror={wrong}", f"--job.dump_folder={tmp_path}/run"]
    assert main(["train", "--config", "debug.toml", *argv]) == 2
    said = "".join(capfd.readouterr())
    says(said, "checkpoint.mirror: s3://", named)
    assert len(said.splitlines()) == 2 and not (tmp_path / "run").exists()


LEGAL = "legal: s3://, gs:// or az://BUCKET/FOLDER"


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("job.dump_folder", "s3://bucket/run", "a folder here"),
        ("model.hf_assets_path", "hf://me/model", "a folder here"),
        ("job.dump_folder", "gs://bucket/run", "titanlite checkpoint cp URL FOLDER"),
        ("checkpoint.folder", "s3://", LEGAL),
        ("checkpoint.mirror", "/folder", LEGAL),
        ("checkpoint.mirror", "s3://", LEGAL),
    ],
)
def test_what_is_not_there_yet_is_refused_by_name(key, value, named):
    with refused(f'{key} = "{value}"', named, kind=ConfigError):
        job([*SAVING, f"--{key}={value}"], world=1)
