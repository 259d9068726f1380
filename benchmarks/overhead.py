"""The framework's overhead: titanlite's Trainer against a plain PyTorch loop of the same training,
as ratios.

    python benchmarks/overhead.py [--steps 300] [--models llama3 qwen3] [--ranks 1 2] [--replicas]
                                  [--json FILE]

Both train a model of the same sizes, the plain loop one of the usual form (usual.py), on the same
data with the same optimizer and initial values, step by step in turn in the same processes, and
must have the same losses. The time of a clock and the processor time are compared; other work on
the machine disturbs the latter less. A step of the Trainer includes all that its loop does between
two plain steps: data, logging, and checks of due work. Then each runs without the other to measure
its peak memory. With --replicas nothing is sharded: replicas alone against
DistributedDataParallel."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch.distributed as dist  # noqa: E402

from benchmarks.harness import keep, ratio  # noqa: E402
from benchmarks.plain import LOG, Plain, write_tokens  # noqa: E402
from benchmarks.usual import BATCH, SEQ, SIZES, WARM_UP, build  # noqa: E402
from tests.jobs import QUIET, full, job, trainer  # noqa: E402
from titanlite.data.foreign import list_tokens, token_files  # noqa: E402
from titanlite.train.trainer import Trainer  # noqa: E402
from titanlite.verify.pool import Pool  # noqa: E402

VOCAB, TOKENS = 256, 1 << 20
SAME, SURE_STEPS = 1e-5, 100
"""How close losses must be, and in which first steps, since rounding differences grow later."""
PRELOAD = ["titanlite.train.trainer", "torch._dynamo"]
Times = tuple[float, float]
"""Seconds by the clock, and of the process's threads on processors."""


# ------------------------------------------------------------------------------ in turn


def now() -> Times:
    return time.perf_counter(), time.process_time()


def since(began: Times) -> Times:
    clock, processor = now()
    return clock - began[0], processor - began[1]


class InTurn(Trainer):
    """Takes a step of the plain loop before each of its own steps, and times both."""

    plain: Plain
    ours: list[Times]
    theirs: list[Times]
    _since: Times

    def train_step(self) -> None:
        if self.step > 1:
            self.ours.append(since(self._since))
        dist.barrier()
        began = now()
        self.plain.step()
        self.theirs.append(since(began))
        dist.barrier()
        self._since = now()
        super().train_step()


def data(folder: str) -> Path:
    return Path(folder) / "tokens.npy"


def overrides(steps: int, folder: str, replicas: bool, model: str) -> list[str]:
    sizes = [f"--model.name={model}", "--model.flavor=debugmodel"]
    sizes += [f"--model.overrides.{name}={size}" for name, size in SIZES.items()]
    tokens = [
        "--training.dataset=tokens",
        f"--training.dataset_path={folder}/listed",
        f"--training.seq_len={SEQ}",
    ]
    same = (
        "--optimizer.lr=1e-3 --lr_scheduler.warmup_steps=0 "
        "--lr_scheduler.decay_ratio=0 --debug.seed=0"
    ).split()
    batch = [
        f"--training.local_batch_size={BATCH}",
        f"--training.steps={steps}",
        f"--metrics.log_freq={LOG}",
    ]
    mesh = (
        [f"--parallelism.data_parallel_replicate_degree={dist.get_world_size()}"]
        if replicas
        else []
    )
    return [*QUIET, *sizes, *tokens, *same, *batch, *mesh]


def in_turn(
    steps: int, folder: str, replicas: bool, model: str
) -> tuple[list[Times], list[Times], list[float]]:
    """Return the times of titanlite's steps and of the plain ones, and the losses of the plain
    ones.
    """
    run = trainer(overrides(steps, folder, replicas, model), f"{folder}/run", kind=InTurn)
    assert isinstance(run, InTurn)
    weights = {name: full(tensor) for name, tensor in run.parts[0].state_dict().items()}
    run.plain = Plain(
        run.job.model_config,
        data(folder),
        SEQ,
        BATCH,
        weights,
        replicas=replicas,
        build=build(model),
    )
    run.ours, run.theirs = [], []
    run.train()
    return run.ours[WARM_UP:], run.theirs[WARM_UP:-1], run.plain.losses


def steps_in_turn(
    ranks: int, steps: int, folder: Path, replicas: bool, model: str
) -> dict[str, Any]:
    pool = Pool(ranks, PRELOAD)
    of_ranks = pool.run(in_turn, steps, str(folder), replicas, model, world=ranks, timeout=3600)
    pool.close()
    losses = of_ranks[0][2]
    ours, theirs = ([clock for clock, _ in of_ranks[0][which]] for which in (0, 1))
    processor, plain_processor = (
        [
            sum(seconds for _, seconds in step)
            for step in zip(*(rank[which] for rank in of_ranks), strict=True)
        ]
        for which in (0, 1)
    )
    records = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    sure = [record["loss"] for record in records if record["step"] <= SURE_STEPS]
    pairs = list(zip(sure, losses[: len(sure)], strict=True))
    worst = max(abs(ours / plain - 1) for ours, plain in pairs)
    assert worst < SAME, f"these are not the same training: {pairs}"
    found = ratio(ours, theirs)
    of_processor = ratio(processor, plain_processor)
    data = statistics.mean(
        record["data_seconds"] / record["step_seconds"] for record in records[1:]
    )
    kind = "replica" if replicas else "rank"
    if ranks > 1:
        kind += "s"
    print(
        f"{model}, {ranks} {kind}, "
        f"{len(ours)} steps of {1000 * statistics.median(theirs):.0f} ms in turn:"
    )
    print(f"  step, titanlite / plain         {found}")
    print(
        f"  processor time, of all ranks    {of_processor}, "
        f"plain {1000 * statistics.median(plain_processor):.0f} ms"
    )
    print(f"  losses                          within {worst:.1e} of each other")
    print(f"  wait for data                   {100 * data:.2f} % of the step", flush=True)
    return {
        "ratio": found.middle, "low": found.low, "high": found.high,
        "processor_ratio": of_processor.middle, "processor_low": of_processor.low,
        "processor_high": of_processor.high, "losses_within": worst, "data_share": data,
    }  # fmt: skip


# ------------------------------------------------------------------------------ each by itself


def peak_by_itself(
    which: str, steps: int, folder: str, replicas: bool, model: str
) -> tuple[float, float]:
    """Return the growth of the peak in MiB since before anything was built, without and with pages
    of files.
    """
    own, every, highest, ended = resident("RssAnon"), resident("VmRSS"), [0.0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.001):
            highest[0] = max(highest[0], resident("RssAnon"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    if which == "plain":
        flavor = job(overrides(steps, folder, replicas, model), dist.get_world_size()).model_config
        plain = Plain(flavor, data(folder), SEQ, BATCH, replicas=replicas, build=build(model))
        for _ in range(steps):
            plain.step()
    else:
        trainer(overrides(steps, folder, replicas, model), f"{folder}/{which}").train()
    ended.set()
    watcher.join()
    return highest[0] - own, resident("VmHWM") - every


def resident(field: str) -> float:
    """Return this process's MiB: now (VmRSS), now without pages of files (RssAnon), or at most so
    far (VmHWM).
    """
    (line,) = [
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(field)
    ]
    return int(line.split()[1]) / 1024


def peaks(ranks: int, folder: Path, replicas: bool, model: str) -> dict[str, float]:
    found = dict[str, list[float]]()
    for which in ("plain", "titanlite"):
        pool = Pool(ranks, PRELOAD)
        of_ranks = pool.run(
            peak_by_itself, which, 20, str(folder), replicas, model, world=ranks, timeout=600
        )
        found[which] = [max(kind) for kind in zip(*of_ranks, strict=True)]
        pool.close()
    (own, every), (plain_own, plain_every) = found["titanlite"], found["plain"]
    print(f"  peak memory, each by itself     {own / plain_own:.3f} of plain ({plain_own:.0f} MiB)")
    print(
        f"  including pages of libraries    {every / plain_every:.3f} "
        f"of plain ({plain_every:.0f} MiB)",
        flush=True,
    )
    return {"memory_ratio": own / plain_own, "memory_ratio_with_files": every / plain_every}


def write_data(folder: str, tokens: int) -> None:
    """Write the ids that both loops read, and titanlite's list of them."""
    write_tokens(data(folder), VOCAB, tokens)
    files = token_files("bench", str(data(folder)), "int64")
    list_tokens({"bench": files}, "int64", -1, Path(folder) / "listed")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--models", nargs="*", default=["llama3", "qwen3"])
    parser.add_argument("--replicas", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    for model, ranks in itertools.product(arguments.models, arguments.ranks):
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            write_data(folder, TOKENS)
            turns = steps_in_turn(ranks, arguments.steps, Path(folder), arguments.replicas, model)
            found[f"{model}, ranks {ranks}"] = turns | peaks(
                ranks, Path(folder), arguments.replicas, model
            )
    if arguments.json:
        keep(arguments.json, found)


if __name__ == "__main__":
    main()
