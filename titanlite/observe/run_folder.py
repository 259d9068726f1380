"""The dump folder of a run: earlier runs are moved aside, and what a run was is written down."""

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

MOVED = ("metrics.jsonl", "logs", "config.toml", "environment.json")


def archive_previous_files(config: JobConfig) -> Path | None:
    """Move what an earlier run wrote to previous/<time>/; the place, or None where there was nothing.

    W&B's folder stays: it has a folder for each run, whose place W&B told the user.
    """
    dump_folder, profiling = Path(config.job.dump_folder), config.profiling
    dump_folder.mkdir(parents=True, exist_ok=True)
    folders = config.metrics.save_tb_folder, profiling.save_traces_folder, profiling.save_memory_snapshot_folder
    return _move(dump_folder, (*MOVED, *folders))


def archive_previous_logs(dump_folder: Path) -> Path | None:
    """Of a run that is resumed, move what each start writes anew; metrics and traces go on where they are."""
    return _move(dump_folder, MOVED[1:])


def _move(dump_folder: Path, names: tuple[str, ...]) -> Path | None:
    found = [dump_folder / name for name in names if (dump_folder / name).exists()]
    if not found:
        return None
    aside = new_archive_folder(dump_folder)
    for path in found:
        path.rename(aside / path.name)
    return aside


def new_archive_folder(dump_folder: Path) -> Path:
    """A new folder previous/<time>."""
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    aside = dump_folder / "previous" / stamp
    number = 1
    while aside.exists():
        number += 1
        aside = dump_folder / "previous" / f"{stamp}_{number}"
    aside.mkdir(parents=True)
    return aside


def describe_run(dump_folder: Path, job: Job, seed: int, device: str) -> None:
    """Write config.toml and environment.json."""
    (dump_folder / "config.toml").write_text(to_toml(job.given), encoding="utf-8")
    environment = json.dumps(describe_environment(job, seed, device), indent=2)
    (dump_folder / "environment.json").write_text(environment + "\n", encoding="utf-8")


def describe_environment(job: Job, seed: int, device: str) -> dict[str, Any]:
    """Versions, place and mesh of a run."""
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
    """Versions of what computes."""
    found = {"python": platform.python_version()}
    for name in ("titanlite", "torch", "torchdata", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


@cache
def git_revision() -> str | None:
    """The revision of the checkout that runs, marked where files differ from it; None outside a checkout."""
    here = Path(__file__).parent

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(here), *words], capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if not git("ls-files", __file__):
        return None  # installed inside somebody else's checkout
    revision = git("rev-parse", "HEAD")
    return f"{revision} with changes" if revision and git("status", "--porcelain") else revision
