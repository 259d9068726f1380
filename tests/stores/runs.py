"""Runs whose checkpoints are in a store, and what they left there."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.checkpoint.saved import run_until
from tests.checkpoint.test_resume import logged
from tests.lanes import sample
from tests.stores.server import in_environment
from titanlite.checkpoint.manifest import MANIFEST, committed, faults, read_manifest, step_folder
from titanlite.runtime import bucket
from titanlite.runtime.bucket import place
from titanlite.runtime.store import list_folder

QUIET = logging.getLogger("quiet")
TO = "--training.steps={}".format
CLOUDS = sample(["s3", "gs", "az"], "s3", "gs")
Train = Callable[..., tuple[list[Any], int, str]]


@dataclass
class Store:
    """An empty place in a store, the environment that leads there, and a proxy before it."""

    name: str
    url: str
    environment: dict[str, str]
    proxy: Any = None


def run_at(
    environment: dict[str, str],
    argv: list[str],
    folder: str,
    stop: int | None = None,
    patience: float = 1,
) -> dict[str, Any]:
    """Train on a rank, with the stores of an environment."""
    bucket._PATIENCE_SECONDS = patience
    with in_environment(environment):
        return run_until(argv, folder, stop)


def put(url: str, name: str, content: bytes) -> None:
    path: Any = place(f"{url}/{name}")
    path.bucket.put(path.key, [content], len(content))


def whole_steps(url: str) -> list[int]:
    """Return the steps of a place, every byte read."""
    root, whole = place(url), []
    for step in committed(root):
        folder = step_folder(root, step)
        if MANIFEST in list_folder(folder):
            manifest = read_manifest(folder)
            assert not faults(folder, manifest, manifest.files)
            whole.append(step)
    return whole


def lose_the_folder_and_go_on(train: Train, straight: tuple[Path, Any], url: str, run: Path) -> str:
    """Require that a run that lost its folder goes on from a store in the same bits; return the
    log.
    """
    train(4)
    assert whole_steps(url)[-1] == 4
    shutil.rmtree(run)
    state, begun, log = train(6)
    assert begun == 4 and state == straight[1] and whole_steps(url)[-1] == 6
    assert logged(run) == logged(straight[0])
    assert {"metrics.jsonl", "config.toml", "latest"} <= list_folder(place(url)).keys()
    return log
