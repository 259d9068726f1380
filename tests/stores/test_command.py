"""The real command with a mirror: killed and robbed of its folder, stopped beside a slow store, and
refused before any worker starts.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.jobs import TINY, job
from tests.runs import descendants, finish, records, start
from tests.stores.server import credentials, mistake
from titanlite.checkpoint.load import load_tensors
from titanlite.config.load import ConfigError
from titanlite.errors import UserError
from titanlite.launch.preflight import _check_mirror
from titanlite.runtime.bucket import place
from titanlite.runtime.store import list_folder

STEPS = 120
ARGV = [
    *TINY,
    "--checkpoint.enable",
    "--checkpoint.interval=10",
    "--checkpoint.async_mode=async",
    "--metrics.log_freq=1",
    f"--training.steps={STEPS}",
    "--debug.seed=1",
]


def until(process, file: Path, least: int) -> None:
    """Wait until a file has a number that is large enough."""
    deadline = time.monotonic() + 300
    while not file.exists() or int(file.read_text()) < least:
        assert time.monotonic() < deadline and process.poll() is None, finish(process)
        time.sleep(0.02)


def titanlite_at(port: int, *arguments: str) -> tuple[int, str]:
    """Run a command with s3:// at a server's port; return its exit code and output."""
    result = subprocess.run(
        [sys.executable, "-m", "titanlite", *arguments],
        env={**os.environ, **credentials(port)},
        capture_output=True,
        text=True,
    )
    return result.returncode, result.stdout + result.stderr


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(each["step"], each["loss"]) for each in records(folder) if "loss" in each]


@pytest.mark.exhaustive
def test_a_run_that_is_killed_and_loses_its_folder_goes_on_by_the_same_command(
    url, proxy, tmp_path
):
    here = {"NGPU": "2", **credentials(proxy.port)}
    stored = list[str]()

    def note(method: str, path: str) -> None:
        if method == "PUT":
            stored.append(path.partition("?")[0].rpartition("/")[2])

    proxy.rule = note
    folder, argv = tmp_path / "run", [*ARGV, f"--checkpoint.mirror={url}"]
    process = start(argv, folder, **here)
    until(process, folder / "checkpoint/mirrored", 30)
    assert stored.index("metrics.jsonl") < stored.index("manifest.json")
    for pid in [process.pid, *descendants(process.pid)]:
        os.kill(pid, signal.SIGKILL)
    process.wait()
    shutil.rmtree(folder)
    code, out = finish(start(argv, folder, **here))
    assert code == 0 and "fetched step" in out and f"step-{STEPS} and in {url}" in out
    code, _ = finish(start(ARGV, tmp_path / "straight", NGPU="2"))
    assert code == 0
    assert losses(folder) == losses(tmp_path / "straight")
    ours, theirs = (
        load_tensors(run / f"checkpoint/step-{STEPS}") for run in (folder, tmp_path / "straight")
    )
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours)


@pytest.mark.exhaustive
def test_a_stop_request_waits_for_a_slow_mirror_no_longer_than_the_grace(url, proxy, tmp_path):
    here = {"NGPU": "2", **credentials(proxy.port)}
    folder, argv = tmp_path / "run", [*ARGV, f"--checkpoint.mirror={url}"]
    argv += ["--training.steps=100000", "--fault.grace_seconds=8"]
    process = start(argv, folder, **here)
    until(process, folder / "checkpoint/mirrored", 10)
    proxy.rule = lambda method, path: {"rate": 2000} if method == "PUT" else None
    process.send_signal(signal.SIGTERM)
    code, out = finish(process)
    last = out.strip().splitlines()[-1]
    assert code == 75 and f"{url} is behind, at step" in last
    proxy.rule = lambda method, path: None
    process = start(argv, folder, **here)
    until(process, folder / "checkpoint/mirrored", int(last.rpartition(" ")[2]) + 1)
    process.send_signal(signal.SIGTERM)
    code, out = finish(process)
    assert code == 75 and f" and in {url}" in out.strip().splitlines()[-1]


@pytest.mark.exhaustive
def test_the_runs_of_a_sweep_have_mirrors_of_their_own(url, proxy, tmp_path):
    argv = [*TINY, "--checkpoint.enable", f"--checkpoint.mirror={url}", "--training.steps=2"]
    argv.append("--sweep=optimizer.lr=1e-3,2e-3")
    code, out = finish(start(argv, tmp_path, NGPU="1", **credentials(proxy.port)))
    assert code == 0 and "already at step" not in out
    assert list_folder(place(url)).keys() == {"optimizer.lr=1e-3", "optimizer.lr=2e-3"}


def test_the_launcher_checks_a_mirror_in_a_process_of_its_own(url, proxy, tmp_path):
    argv = [*TINY, "--checkpoint.enable", f"--job.dump_folder={tmp_path}"]
    _check_mirror(job([*argv, f"--checkpoint.mirror={url}"], world=1).config)
    assert {method for method, _ in proxy.log} == {"GET", "PUT", "POST"}  # list, write, delete
    with pytest.raises(UserError, match="^checkpoint.mirror: s3://nobody: there is no such bucket"):
        _check_mirror(job([*argv, "--checkpoint.mirror=s3://nobody/run"], world=1).config)


@pytest.mark.long
@pytest.mark.parametrize("case", ["no bucket", "read only", "no key", "no answer"])
def test_what_is_wrong_with_a_mirror_is_one_line_before_anything_starts(case, url, proxy, tmp_path):
    url, here, line = mistake(case, url, proxy.port, tmp_path)
    line = line or "the credentials do not allow this (or are wrong) (Injected) (asked to write)"
    proxy.rule = lambda method, path: {"status": 403} if method == "PUT" else None
    argv = [*ARGV, f"--checkpoint.mirror={url}"]
    code, out = finish(start(argv, tmp_path / "run", NGPU="1", **here))
    assert code == 2 and "checkpoint.mirror: s3://" in out and line in out
    assert "Traceback" not in out and not (tmp_path / "run").exists()
    proxy.rule = lambda method, path: None
    assert case == "no bucket" or not list_folder(place(url))


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("job.dump_folder", "s3://bucket/run", "must be a folder here"),
        ("model.hf_assets_path", "s3://bucket/model", "must be a folder here"),
        ("model.hf_assets_path", "hf://me/model", "must be a folder here"),
        ("job.dump_folder", "gs://bucket/run", "titanlite checkpoint cp URL FOLDER"),
        ("checkpoint.folder", "s3://", "legal: s3://, gs:// or az://BUCKET/FOLDER"),
        ("checkpoint.mirror", "/folder", "legal: s3://, gs:// or az://BUCKET/FOLDER"),
        ("checkpoint.mirror", "s3://", "legal: s3://, gs:// or az://BUCKET/FOLDER"),
    ],
)
def test_what_is_not_there_yet_is_refused_by_name(key, value, line):
    with pytest.raises(ConfigError) as caught:
        job([*TINY, "--checkpoint.enable", f"--{key}={value}"], world=1)
    assert f'{key} = "{value}"' in str(caught.value) and line in str(caught.value)


@pytest.mark.exhaustive
def test_a_run_without_a_disk_that_is_killed_goes_on_by_the_same_command(url, proxy, tmp_path):
    here = {"NGPU": "2", "XDG_CACHE_HOME": str(tmp_path), **credentials(proxy.port)}
    folder, argv = tmp_path / "run", [*ARGV, f"--checkpoint.folder={url}"]
    process = start(argv, folder, **here)
    until(process, folder / ".saved", 30)
    for pid in [process.pid, *descendants(process.pid)]:
        os.kill(pid, signal.SIGKILL)
    process.wait()
    shutil.rmtree(folder)
    code, out = finish(start(argv, folder, **here))
    assert code == 0 and f" in {url}" in out and "resuming from " in out
    assert "run.lock: waiting 30 s to see if pid" in out
    assert f"saved: {url}/step-{STEPS}" in out
    code, out = finish(start(argv, folder, **here))
    assert code == 0 and f"already at step {STEPS}" in out and "give --checkpoint.folder" in out
    code, _ = finish(start(ARGV, tmp_path / "straight", NGPU="2"))
    assert code == 0
    assert losses(folder) == losses(tmp_path / "straight")
    code, out = titanlite_at(proxy.port, "checkpoint", "cp", url, str(tmp_path / "copy"))
    assert code == 0 and f"{url}/step-{STEPS} is now in" in out
    ours, theirs = (
        load_tensors(tmp_path / name / f"step-{STEPS}") for name in ("copy", "straight/checkpoint")
    )
    assert all(ours[name].equal(theirs[name]) for name in theirs)
    code, out = titanlite_at(proxy.port, "generate", "--checkpoint", url, "--tokens", "4")
    assert code == 0 and f"{url}/step-{STEPS}" in out


@pytest.mark.exhaustive
def test_a_rank_that_dies_is_restarted_from_the_bucket_without_waiting(url, proxy, tmp_path):
    here = {"NGPU": "2", "XDG_CACHE_HOME": str(tmp_path), **credentials(proxy.port)}
    folder, argv = tmp_path / "run", [*ARGV, f"--checkpoint.folder={url}"]
    process = start(argv, folder, **here)
    until(process, folder / ".saved", 30)
    os.kill(max(descendants(process.pid)), signal.SIGKILL)
    code, out = finish(process)
    assert code == 0 and f"from {url}/step-" in out and "waiting 30 s" not in out
    code, out = titanlite_at(proxy.port, "checkpoint", "verify", url)
    assert code == 0 and f"step-{STEPS}: verified" in out
