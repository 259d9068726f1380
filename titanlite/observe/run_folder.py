"""The dump folder of a run: archiving earlier runs in it, and the files that describe a run."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from titanlite.config.job import Job
from titanlite.config.schema import JobConfig
from titanlite.config.toml import to_toml
from titanlite.layout import DIMENSIONS

_WRITTEN_AT_START = ("logs", "config.toml", "environment.json")


def archive_previous_files(config: JobConfig) -> Path | None:
    """Move what an earlier run wrote to previous/<time>/, and return that folder; None if there was nothing.

    W&B's folder stays: it has a folder per run, whose path W&B printed.
    """
    dump_folder, profiling = Path(config.job.dump_folder), config.profiling
    dump_folder.mkdir(parents=True, exist_ok=True)
    folders = config.metrics.save_tb_folder, profiling.save_traces_folder, profiling.save_memory_snapshot_folder
    return _archive(dump_folder, ("metrics.jsonl", *_WRITTEN_AT_START, *folders))


def archive_previous_logs(dump_folder: Path) -> Path | None:
    """Move only what each start writes: a resumed run appends to its metrics and traces."""
    return _archive(dump_folder, _WRITTEN_AT_START)


def _archive(dump_folder: Path, names: tuple[str, ...]) -> Path | None:
    paths = [dump_folder / name for name in names if (dump_folder / name).exists()]
    if not paths:
        return None
    archive = new_archive_folder(dump_folder)
    for path in paths:
        path.rename(archive / path.name)
    return archive


def new_archive_folder(dump_folder: Path) -> Path:
    """Make and return a folder previous/<time>."""
    start = archive = dump_folder / "previous" / time.strftime("%Y-%m-%d_%H-%M-%S")
    number = 1
    while archive.exists():
        number += 1
        archive = start.with_name(f"{start.name}_{number}")
    archive.mkdir(parents=True)
    return archive


def describe_run(dump_folder: Path, job: Job, seed: int, device: str) -> None:
    """Write config.toml and environment.json."""
    (dump_folder / "config.toml").write_text(to_toml(job.given), encoding="utf-8")
    environment = json.dumps(describe_environment(job, seed, device), indent=2)
    (dump_folder / "environment.json").write_text(environment + "\n", encoding="utf-8")


def describe_environment(job: Job, seed: int, device: str) -> dict[str, Any]:
    """Return the versions, host and mesh of a run."""
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "git_revision": git_revision(),
        "versions": versions(),
        "device": device,
        "host": platform.node(),
        "world_size": job.layout.world,
        "mesh": dict(zip(DIMENSIONS, job.layout.degrees, strict=True)),
        "seed": seed,
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that compute."""
    installed = {"python": platform.python_version()}
    for name in ("titanlite", "torch", "torchdata", "numpy"):
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            installed[name] = "not installed"
    return installed


@cache
def git_revision() -> str | None:
    """Return the revision of the checkout that runs, marked if files differ from it; None outside a checkout."""

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if not git("ls-files", __file__):
        return None  # installed inside another project's checkout
    revision = git("rev-parse", "HEAD")
    return f"{revision} with changes" if revision and git("status", "--porcelain") else revision
