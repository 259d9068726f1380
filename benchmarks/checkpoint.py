"""Compare the cost of a save with torch's own: the same state, in one run, as ratios.

    python benchmarks/checkpoint.py [--rounds 7] [--ranks 1] [--dim 640] [--json FILE]
    python benchmarks/checkpoint.py --root s3://bucket/empty     in the store of the environment
    python benchmarks/checkpoint.py --before FOLDER              against another checkout

Rounds alternate between a copy of the state in memory, an async save, a sync save, and a bare
`torch.distributed.checkpoint.save` of the same tensors, fsynced as ours is, but without checksums,
manifest and commit. With --root the bare one is obstore's own put of the same bytes in the same
parts, and a load is compared with its get of them. Blocked is how long training waits. With
--before, rounds of this checkout and of another one alternate."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

TREE = "TITANLITE_TREE"
"""Variable with the checkout that --before measures; its seconds are printed as JSON."""
TURNS = "TITANLITE_TURNS"
"""Variable with the file that the checkout locks during its turn."""
sys.path.insert(0, os.environ.get(TREE) or str(Path(__file__).parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402

from tests.jobs import TINY, trainer  # noqa: E402
from titanlite.checkpoint import load  # noqa: E402
from titanlite.checkpoint.manifest import Position  # noqa: E402
from titanlite.checkpoint.saver import PendingSave, Saver  # noqa: E402
from titanlite.runtime.bucket import place  # noqa: E402
from titanlite.train.trainer import Trainer  # noqa: E402
from titanlite.verify.pool import Pool  # noqa: E402

COPY, BARE = "a copy of the state in memory", "bare: DCP, fsynced, or obstore"
ASYNC_BLOCKED, ASYNC_WRITE = "async save: blocked", "async save: write, in the background"
SYNC_BLOCKED = "sync save: blocked"
LOAD, GET = "load, verified", "bare: obstore's get"
BYTES = "bytes read in a load"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--dim", type=int, default=640)
    parser.add_argument("--root", default="", help="URL of an empty place for the checkpoints")
    parser.add_argument("--before", default="", help="another checkout")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.before:
        against(arguments)
        return
    pool = Pool(arguments.ranks, preload=["titanlite.train.trainer"])
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        given = arguments.rounds, arguments.dim, folder, arguments.root
        size, seconds = pool.run(measured, *given, timeout=1800)[0]
    pool.close()
    if TREE in os.environ:
        print(json.dumps(seconds))
        return
    print(f"{size / 1e6:.0f} MB a rank, {arguments.ranks} ranks, {arguments.rounds} rounds")
    show(seconds, arguments)


def show(seconds: dict[str, list[float]], arguments: argparse.Namespace) -> None:
    """Print, and keep, the ratios to a copy of the state and to the bare save or load."""
    from benchmarks.harness import keep, ratio  # another checkout may have none

    found: dict[str, Any] = {BYTES: seconds.pop(BYTES)[0]}
    print(f"  {BYTES}: {found[BYTES]:,.0f}")
    for what, taken in seconds.items():
        bare = BARE
        if arguments.root and what in (LOAD, GET):
            bare = GET
        of_copy = ratio(taken, seconds[COPY])
        of_bare = ratio(taken, seconds[bare])
        median = statistics.median(taken)
        print(f"  {what:<36} {of_copy} of the copy   {of_bare} of bare   {median:.3f} s")
        found[what] = {"of_copy": asdict(of_copy), "of_bare": asdict(of_bare), "seconds": median}
    if arguments.json:
        keep(arguments.json, found)


def against(arguments: argparse.Namespace) -> None:
    """Print what is measured here, and its ratios to another checkout's, in alternating rounds."""
    from benchmarks.harness import keep, ratio

    given = [f"--{name}={getattr(arguments, name)}" for name in ("ranks", "dim", "rounds")]
    command = [sys.executable, __file__, *given]
    with tempfile.NamedTemporaryFile() as turns:
        running = [
            subprocess.Popen(
                command,
                cwd=tree,
                env=os.environ | {TREE: tree, TURNS: turns.name},
                stdout=subprocess.PIPE,
            )
            for tree in (str(Path(__file__).parents[1]), arguments.before)
        ]
        here, before = (json.loads(each.communicate()[0].splitlines()[-1]) for each in running)
    found = {}
    for what, taken in here.items():
        of_before = ratio(taken, before[what])
        medians = f"{statistics.median(taken):,.3f} and {statistics.median(before[what]):,.3f}"
        print(f"  {what:<36} {of_before} of before   {medians}")
        found[what] = asdict(of_before)
    if arguments.json:
        keep(arguments.json, {"of_before": found})


@contextmanager
def _turn() -> Iterator[None]:
    """Wait for this checkout's turn of a round, on all ranks."""
    with open(os.environ.get(TURNS, os.devnull), "w") as file:
        if dist.get_rank() == 0:
            fcntl.flock(file, fcntl.LOCK_EX)
        dist.barrier()
        yield
        dist.barrier()
    time.sleep(0.2 if TURNS in os.environ else 0)


def measured(rounds: int, dim: int, folder: str, root: str) -> tuple[int, dict[str, list[float]]]:
    """Return bytes per rank, and seconds of each way by round, without the first round, which makes
    buffers.
    """
    sizes = [
        f"--model.overrides.{name}"
        for name in (f"dim={dim}", f"hidden_dim={4 * dim}", "n_layers=4")
    ]
    argv = [
        *TINY,
        *sizes,
        "--training.steps=1",
        "--checkpoint.enable",
        "--checkpoint.async_mode=async",
    ]
    if root:
        argv.append(f"--checkpoint.folder={root}")
    run = trainer([*argv, "--checkpoint.keep_latest_k=1"], folder)
    run.train()
    run.saver.records.clear()
    local = [
        t.to_local() if isinstance(t, dist.tensor.DTensor) else t
        for t in run.state.tensors().values()
    ]
    buffers = [torch.empty_like(tensor) for tensor in local]
    synchronous = _synchronous(run)
    seconds: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        with _turn():
            taken = {
                COPY: _timed(
                    lambda: [b.copy_(t.detach()) for b, t in zip(buffers, local, strict=True)]
                )
            }
            costs = _saved(run, run.saver, 2 * number + 2).costs
            taken |= {ASYNC_BLOCKED: costs["blocked"], ASYNC_WRITE: costs["write"]}
            taken[SYNC_BLOCKED] = _saved(run, synchronous, 2 * number + 3).costs["blocked"]
            taken[BARE] = _timed(
                lambda: _bare_put(run, local) if root else _bare(run, Path(folder) / "bare")
            )
            with _counted_reads() as counts:
                taken[LOAD] = _timed(partial(_load, run, 2 * number + 3))
            taken[BYTES] = sum(counts)
            if root:
                taken[GET] = _timed(lambda: _bare_get(run))
            dist.barrier()
            if dist.get_rank() == 0 and not root:
                shutil.rmtree(Path(folder) / "bare")
            if number == 0:
                continue
            for what, spent in taken.items():
                seconds.setdefault(what, []).append(spent)
    return sum(tensor.nbytes for tensor in local), seconds


def _timed(action: Callable[[], object]) -> float:
    dist.barrier()
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def _synchronous(run: Trainer) -> Saver:
    """Return a saver of the same folder without async_mode."""
    other = Saver(run.checkpoints, run.runner.context.device)
    other.settings = other.settings.model_copy(update={"async_mode": "disabled"})
    return other


def _saved(run: Trainer, by: Saver, step: int) -> PendingSave:
    dist.barrier()
    by.save(Position(step, 0, 0, 0, 0, ""), run.state, None, {})
    by.finish_save()
    return by.records.pop()


def _bare(run: Trainer, folder: Path) -> None:
    writer = dcp.FileSystemWriter(folder)
    dcp.save(dict(run.state.tensors()), storage_writer=writer)


def _bare_put(run: Trainer, tensors: list[Any]) -> None:
    """Put the same bytes by obstore alone, one object per rank."""
    settings = run.saver.settings
    part = settings.part_mib << 20
    path: Any = place(run.job.config.checkpoint.folder) / f"bare-{dist.get_rank()}"
    parts = (
        memoryview(block.numpy())
        for tensor in tensors
        for block in tensor.detach().reshape(-1).view(torch.uint8).split(part)
    )
    _put(parts, path, part, settings.upload_parallel)


def _load(run: Trainer, step: int) -> None:
    group = dist.group.WORLD
    assert group
    resume = load.at_step(run.checkpoints.root, step, full=True, group=group)
    load.restore(resume, run.state, group)


@contextmanager
def _counted_reads() -> Iterator[list[int]]:
    """Yield the bytes of each part of a tensor that is read from a safetensors file."""
    counts: list[int] = []

    class Counted:
        def __init__(self, file: Any) -> None:
            self._file = file

        def __enter__(self) -> Counted:
            self._opened = self._file.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self._file.__exit__(*error)

        def get_slice(self, name: str) -> Counted:
            self._slice = self._opened.get_slice(name)
            return self

        def __getitem__(self, region: Any) -> torch.Tensor:
            values = self._slice[region]
            counts.append(values.nbytes)
            return values

    module: Any = import_module("titanlite.checkpoint.load")
    if not hasattr(module, "safe_open"):
        module = import_module("titanlite.checkpoint.read")
    opening = module.safe_open
    with patch.object(module, "safe_open", lambda *args, **more: Counted(opening(*args, **more))):
        yield counts


def _bare_get(run: Trainer) -> None:
    """Get what the bare put stored, by obstore alone."""
    path: Any = place(run.job.config.checkpoint.folder) / f"bare-{dist.get_rank()}"
    path.bucket.call("get", path.key).bytes()


def _put(content: Any, target: Any, part: int = 64 << 20, parallel: int = 4) -> None:
    """Put a file, or parts, by obstore alone."""
    target.bucket._uploads.put(target.key, content, chunk_size=part, max_concurrency=parallel)


if __name__ == "__main__":
    main()
