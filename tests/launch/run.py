"""Start the real command, as a person would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.jobs import OUTSIDE

ROOT = Path(__file__).parents[2]
CLEARED = ("NGPU", "LOG_RANK", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "CONFIG_FILE")


def environment(**extra: str) -> dict[str, str]:
    variables = {k: v for k, v in os.environ.items() if k not in CLEARED and not k.startswith(("SLURM_", "PET_"))}
    variables["PYTHONPATH"] = os.pathsep.join([str(ROOT), OUTSIDE])
    return {**variables, "OMP_NUM_THREADS": "1", **extra}


def start(argv: list[str], folder: Path, module: str = "titanlite train", **environ: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", *module.split(), *argv, f"--job.dump_folder={folder}"],
        env=environment(**environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
    )


def finish(process: subprocess.Popen, timeout: float = 90) -> tuple[int, str]:
    """Return the exit code and everything that was printed."""
    try:
        out, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        out, _ = process.communicate()
        raise AssertionError(f"still running after {timeout} s:\n{out}") from None
    return process.returncode, out


def train(argv: list[str], folder: Path, **environ: str) -> tuple[int, str]:
    return finish(start(argv, folder, **environ))


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
