"""Small runs that save and resume, on the pool's ranks."""

import hashlib
from collections.abc import Mapping
from multiprocessing import active_children, current_process
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.jobs import TINY, full, keeping_log, trainer, weights
from titanlite.checkpoint import commit
from titanlite.checkpoint.manifest import MANIFEST, Manifest
from titanlite.checkpoint.plan import Planner, nested
from titanlite.errors import UserError
from titanlite.runtime.store import LocalPath
from titanlite.train.trainer import Trainer

SAVING = [
    *TINY,
    *("--checkpoint.enable", "--checkpoint.interval=1", "--checkpoint.async_mode=async"),
    *("--checkpoint.keep_latest_k=10", "--lr_scheduler.total_steps=12", "--metrics.log_freq=1"),
]


class Stop(Exception):
    """Ends a run at the step that a test chose."""


def digests(run: Trainer) -> dict[str, Any]:
    """Return a hash of every tensor, and every number, of the whole state."""
    digests: dict[str, Any] = dict(run.state.numbers())
    for name, tensor in run.state.tensors().items():
        content = full(tensor).cpu().reshape(-1).view(torch.uint8)  # numpy has no bfloat16
        digests[name] = hashlib.sha256(content.numpy().tobytes()).hexdigest()
    return digests


def joined(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the digests of all pipeline stages; those that several ranks have must be equal."""
    state: dict[str, Any] = {}
    for rank in ranks:
        assert {name: state.setdefault(name, value) for name, value in rank.items()} == rank
    return state


def start(argv: list[str], folder: str) -> dict[str, Any]:
    """Start a run; return the step that it goes on from and its weights, or the error (and -1);
    and the log.
    """
    log, lines = keeping_log()
    found = {"step": -1, "error": ""}
    try:
        run = trainer(argv, folder, log)
        found |= {"step": run.step, "weights": weights(run)}
    except UserError as error:
        found["error"] = str(error)
    return {**found, "log": "\n".join(lines)}


def run_until(argv: list[str], folder: str, stop: int | None = None) -> dict[str, Any]:
    """Train, resuming if there is a checkpoint; with `stop`, an error ends the run after that many
    steps.
    """
    log, lines = keeping_log()
    current_process()._config["daemon"] = (
        False  # the pool's ranks are daemons, and a loader has children
    )
    run = trainer(argv, folder, log)
    begun, seen = run.step, {}
    fetch = run.next_micro_batches

    def next_micro_batches() -> list[Any]:
        if stop is not None and run.step > stop:
            raise Stop
        batches = fetch()
        seen[run.step] = hashlib.sha256(
            torch.stack([b.rows for b in batches]).numpy().tobytes()
        ).hexdigest()
        return batches

    run.next_micro_batches = next_micro_batches  # type: ignore[method-assign]
    try:
        run.train()
    except Stop:
        run.close()
    for worker in active_children():
        worker.kill()  # the garbage collector would wait 5 seconds for each
    return {"begun": begun, "step": run.step, "state": digests(run), "data": seen, "log": lines}


def everyone() -> dist.ProcessGroup:
    """Return the group of all ranks."""
    assert dist.group.WORLD
    return dist.group.WORLD


def rank() -> int:
    return dist.get_rank()


def steps_in(folder: LocalPath) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoint").iterdir() if path.is_dir())


def empty_step(folder: LocalPath, step: int) -> None:
    """Make a folder a complete step without tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).write_bytes(Manifest(step, False, {}, {}).render())


def commit_tensors(
    root: LocalPath,
    tensors: Mapping[str, torch.Tensor],
    group: dist.ProcessGroup | None = None,
    planner: Planner | None = None,
) -> None:
    """Commit step 1."""
    documents = {"state.json": b"{}\n"}
    content = commit.Content(1, None, lambda _: documents, weights_only=True)
    writer = commit.Writer(root, content, group)
    planner = planner or Planner(group)
    commit.alone(dcp.save, nested(tensors), storage_writer=writer, planner=planner)
