"""Small jobs for tests, and functions that the pool's ranks run."""

from __future__ import annotations

import logging
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from titanlite.config.job import Job, job_from
from titanlite.config.layout import Layout
from titanlite.config.load import parse_command_line
from titanlite.data.loader import MicroBatch
from titanlite.data.shuffle import RankSlice
from titanlite.parallel.mesh import Mesh
from titanlite.planner.fake_world import FakeWorld
from titanlite.runtime.cluster import RankInfo
from titanlite.train.loss import count_valid
from titanlite.train.summary import describe_start
from titanlite.train.trainer import Trainer
from titanlite.train.validate import validation_loss

OUTSIDE = str(Path(__file__).parent / "outside")
TEXT = Path(__file__).parent / "text"
"""Two small data sets of text, `train` and `held_out`, the same on every Python."""

QUIET = [
    "--training.dataset=text",
    f"--training.dataset_path={TEXT / 'train'}",
    "--validation.dataset=text",
    f"--validation.dataset_path={TEXT / 'held_out'}",
]
QUIET += (
    "--training.seq_len=16 --training.local_batch_size=2 --training.steps=3 "
    "--metrics.no_enable_tensorboard --validation.no_enable --generate.no_at_end "
    "--checkpoint.no_enable --job.device=cpu --fault.no_preflight"
).split()
TINY = [
    *QUIET,
    *(
        f"--model.overrides.{field}"
        for field in "dim=16 n_layers=2 n_heads=2 n_kv_heads=1 hidden_dim=32".split()
    ),
]
MOE = [*QUIET, "--model.name=qwen3", "--model.flavor=debugmodel_moe"]
_MOE_SIZES = "dim=16 n_layers=2 n_heads=2 n_kv_heads=2 head_dim=8 expert_dim=8 experts=4 top_k=2"
MOE += [f"--model.overrides.{size}" for size in _MOE_SIZES.split()]
PARROT = [*QUIET, "--model.package=parrot", "--model.name=parrot", "--model.flavor=small"]
FLOAT64 = [
    f"--training.{key}=float64"
    for key in ("dtype", "mixed_precision_param", "mixed_precision_reduce")
]


def job(argv: list[str], world: int | None) -> Job:
    return job_from(
        parse_command_line(["--config", "debug.toml", *argv], {}), world=world, training=True
    )


def trainer(
    argv: list[str], folder: str, log: logging.Logger | None = None, kind: type[Trainer] = Trainer
) -> Trainer:
    """Build a trainer on this rank of the pool."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    return started(job([*argv, f"--job.dump_folder={folder}"], dist.get_world_size()), log, kind)


def started(
    found: Job, log: logging.Logger | None = None, kind: type[Trainer] = Trainer
) -> Trainer:
    """Build a job's trainer on this rank of the pool."""
    rank = dist.get_rank()
    rank_info = RankInfo(rank, dist.get_world_size(), rank, f"host{rank}")
    log = log or logging.Logger("quiet")
    return kind.start(found, rank_info, torch.device("cpu"), log)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the full tensor, on every rank."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def weights(run: Trainer) -> dict[str, torch.Tensor]:
    return {name: full(parameter) for name, parameter in run.parts[0].named_parameters()}


def gradients(run: Trainer) -> dict[str, torch.Tensor]:
    return {name: full(p.grad) for name, p in run.parts[0].named_parameters() if p.grad is not None}


def micro_batches(
    tokens: torch.Tensor, labels: torch.Tensor, rank_slice: RankSlice
) -> list[MicroBatch]:
    """Return this rank's part of a global batch."""
    parts = [rank_slice.micro_batch(0, number) for number in range(rank_slice.accumulation)]
    rows = torch.stack([tokens, labels], dim=1)
    return [MicroBatch(rows[part.start : part.stop]) for part in parts]


def validated(run: Trainer) -> float:
    """Return the validation loss of a run."""
    chunks = run.job.config.training.loss_chunks
    assert run.data.validation_loader is not None
    loss = validation_loss(run.runner.model, run.data.validation_loader, chunks)
    assert loss is not None
    return loss


def forward_backward(run: Trainer, batches: list[MicroBatch]) -> torch.Tensor:
    """Run forward and backward of these micro-batches; return this rank's part of the loss."""
    labels = torch.stack([batch.labels for batch in batches])
    valid = run.guard.exchange(count_valid(labels) * run.runner.model.has_loss)
    return run.runner.forward_backward(run.step, batches, valid)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return ||found - expected|| / ||expected||, or ||found|| if `expected` is zero."""
    scale = expected.norm().item()
    return (found - expected).norm().item() / (scale or 1.0)


def keeping_log() -> tuple[logging.Logger, list[str]]:
    """Return a logger, and the list that its lines go to."""
    lines: list[str] = []
    log = logging.Logger("kept")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    return log, lines


def run_to_end(argv: list[str], folder: str) -> dict[str, Any]:
    """Train; return this rank's weights, its log with the lines of the start, and the step
    reached.
    """
    log, lines = keeping_log()
    run = trainer(argv, folder, log)
    start = describe_start(run)
    run.train()
    return {"weights": weights(run), "log": lines, "start": start, "step": run.step}


@contextmanager
def fake_world(layout: Layout, rank: int = 0) -> Iterator[Mesh]:
    """Be one rank of a layout, without its processes, while the context lasts; yield the layout's
    mesh.
    """
    with FakeWorld() as world:
        yield world.mesh(layout, rank)


def require_close(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], bound: float
) -> None:
    """Require tensors of the same names with relative errors up to a bound."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert relative_error(found[name], tensor) <= bound, name


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Let writes fail beyond a size: Python ignores the signal."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
