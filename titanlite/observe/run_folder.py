"""The dump folder of a run: archives of earlier runs, and the files that describe a run."""

import json
import platform
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from titanlite.config.job import Job
from titanlite.config.layout import DIMENSIONS
from titanlite.config.schema import JobConfig
from titanlite.config.toml import to_toml
from titanlite.errors import UserError
from titanlite.version import __version__

METRICS = "metrics.jsonl"
RUN_ID = "run_id"
_WRITTEN_AT_START = ("logs", "config.toml", "environment.json")


def archive_previous_files(config: JobConfig, resumed: bool) -> Path | None:
    """Move an earlier run's files to previous/<time>/, and return that folder; None if there were
    none.

    A resumed run keeps appending to its metrics and traces. Folders of trackers stay, since they
    have a path for each run.
    """
    dump_folder = Path(config.job.dump_folder)
    profiling = config.profiling
    appended = (
        config.metrics.save_tb_folder,
        profiling.save_traces_folder,
        profiling.save_memory_snapshot_folder,
    )
    names = _WRITTEN_AT_START
    if not resumed:
        names = (*_WRITTEN_AT_START, METRICS, RUN_ID, *appended)
    paths = [dump_folder / name for name in names if (dump_folder / name).exists()]
    if not paths:
        return None
    marks = "environment.json", "logs/rank-*.log", f"{config.checkpoint.folder}/step-*"
    if not any(path for mark in marks for path in dump_folder.glob(mark)):
        found = ", ".join(path.name for path in paths)
        raise UserError(
            f'job.dump_folder = "{config.job.dump_folder}" has {found}, '
            "which no run wrote and a run would move; use another folder"
        )
    return new_archive_folder(dump_folder, paths)


def new_archive_folder(dump_folder: Path, paths: Iterable[Path] = ()) -> Path:
    """Create previous/<time>, move the files there, and return it."""
    start = archive = dump_folder / "previous" / time.strftime("%Y-%m-%d_%H-%M-%S")
    number = 1
    while archive.exists():
        number += 1
        archive = start.with_name(f"{start.name}_{number}")
    archive.mkdir(parents=True)
    for path in paths:
        path.rename(archive / path.name)
    return archive


def describe_run(dump_folder: Path, job: Job, seed: int, device: str) -> None:
    """Write config.toml and environment.json."""
    environment = json.dumps(describe_environment(job, seed, device), indent=2) + "\n"
    for name, text in (("config.toml", to_toml(job.given)), ("environment.json", environment)):
        (dump_folder / name).write_text(text, encoding="utf-8")


def describe_environment(job: Job, seed: int, device: str) -> dict[str, Any]:
    """Return the versions, host and mesh of a run."""
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": ["titanlite", "train", *sys.argv[1:]],
        "git_revision": git_revision(),
        "versions": versions(),
        "device": device,
        "host": platform.node(),
        "world_size": job.layout.world,
        "mesh": dict(zip(DIMENSIONS, job.layout.degrees, strict=True)),
        "stages": [" ".join(names) for names in job.stages.names],
        "model": asdict(job.model_config),
        "seed": seed,
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect numbers."""
    installed = {name: version(name) for name in ("torch", "torchdata", "numpy")}
    return {"python": platform.python_version(), "titanlite": __version__, **installed}


@cache
def git_revision() -> str | None:
    """Return the git revision of this code, marked if files differ from it; None outside a
    checkout.
    """

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if not git("ls-files", __file__):
            return None  # installed inside another project's checkout
        revision = git("rev-parse", "HEAD")
        if git("status", "--porcelain", ":/titanlite", ":/models"):
            revision += " with changes"
        return revision
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None
