"""Runs whose checkpoints are in a store, and what they left there."""

from __future__ import annotations

import logging
import os
from typing import Any

from tests.checkpoint.saved import run_until
from titanlite.checkpoint.manifest import MANIFEST, committed, faults, read_manifest, step_folder
from titanlite.runtime import bucket
from titanlite.runtime.bucket import place
from titanlite.runtime.store import list_folder

QUIET = logging.getLogger("quiet")
TO = "--training.steps={}".format


def run_at(
    environment: dict[str, str],
    argv: list[str],
    folder: str,
    stop: int | None = None,
    patience: float = 1,
) -> dict[str, Any]:
    """Train on a rank, with the stores of an environment."""
    os.environ |= environment
    bucket._PATIENCE_SECONDS = patience
    bucket._open.cache_clear()
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
