"""A run with three checkpoints, and the commands in this process."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.checkpoint.saved import SAVING, run_until
from titanlite.cli import main
from titanlite.observe.sinks import JsonLines, StepRecord
from titanlite.runtime.store import LocalPath

MESH = ["--model.overrides.n_kv_heads=2", "--parallelism.tensor_parallel_degree=2"]


@pytest.fixture(scope="session")
def saved(pool, tmp_path_factory) -> Path:
    """A run of FSDP 2 x tensor parallel 2 with step-1, step-2 and step-3, which validates at the
    end.
    """
    folder = tmp_path_factory.mktemp("tools")
    (folder / "held.txt").write_text("The quick brown fox jumps over the lazy dog. " * 5)
    held_out = ["--validation.enable", f"--validation.dataset_path={folder}/held.txt"]
    pool.run(run_until, [*SAVING, *MESH, *held_out], str(folder), world=4)
    return folder


@pytest.fixture
def run(saved, tmp_path) -> Path:
    return LocalPath(shutil.copytree(saved, tmp_path / "run"))


@pytest.fixture
def tool(capsys):
    """Run `titanlite COMMAND WORDS` in this process, require its exit code, and return what it
    printed.
    """

    def call(command: str, *words: object, code: int = 0) -> str:
        found = main([*command.split(), *map(str, words)])
        out = "".join(capsys.readouterr())
        assert found == code and "Traceback" not in out, out
        assert not dist.is_initialized()
        return out

    return call


def record(step: int, loss: float, **changed: Any) -> StepRecord:
    plain = StepRecord(
        step, loss, loss, 1.0, 1e-3, step * 100, 5000.0, 1.0, None, 3600.0, 1.0, 1.0, 0.0, 1.0, 0
    )
    return replace(plain, **changed)


def write(
    folder: Path,
    records: list[StepRecord],
    validation: Sequence[tuple[int, float]] = (),
    others: Mapping[int, dict[str, Any]] = {},
    torn: str = "",
) -> Path:
    """Make a dump folder, or go on in it, with the sink that training writes with."""
    folder.mkdir(parents=True, exist_ok=True)
    sink = JsonLines(folder / "metrics.jsonl", 99)
    for one in records:
        sink.write(one.step, asdict(one), {})
    losses = {step: {"validation_loss": loss} for step, loss in validation}
    for step, values in (*losses.items(), *others.items()):
        sink.write(step, values, {})
    sink.close()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(torn)
    return folder
