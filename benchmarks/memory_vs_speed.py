"""The time that each way to save memory costs: recompute x reshard x offload x prefetch, in one
table.

    python benchmarks/memory_vs_speed.py [--steps 7] [--json benchmarks/cpu.json]
    python benchmarks/memory_vs_speed.py [--steps 7] [--json FILE] --config … [--section.key …]
                                         (on GPUs)

Rows are relative to the baseline: no recomputation, parameters kept after the forward pass, no
offload, FSDP2's own prefetch. With GPUs, all of them train in bfloat16 by `titanlite train`, and
the peak is the allocator's. On a CPU two ranks train a small model, the bytes that a step allocates
and frees are counted (without parameters and optimizer state; offloaded bytes stay in the same
memory), and steps alternate with the baseline's in the same processes."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from benchmarks.ratios import keep  # noqa: E402
from benchmarks.train import measure  # noqa: E402
from tests.jobs import QUIET, trainer  # noqa: E402
from titanlite.data.loader import MicroBatch  # noqa: E402
from titanlite.planner.rehearse import count_later_step  # noqa: E402
from titanlite.train.trainer import Trainer  # noqa: E402
from titanlite.verify.pool import Pool  # noqa: E402

AC, FSDP = "--activation_checkpoint.", "--parallelism.fsdp_"
CHOICES: dict[str, dict[str, list[str]]] = {
    "recompute": {
        "none": [AC + "mode=none"],
        "op": [AC + "mode=selective", AC + "selective_ac_option=op"],
        "2nd": [AC + "mode=selective", AC + "selective_ac_option=2"],
        "full": [AC + "mode=full"],
    },
    "reshard": {
        "never": [FSDP + "reshard_after_forward=never"],
        "always": [FSDP + "reshard_after_forward=always"],
    },
    "offload": {"no": [], "yes": ["--training.enable_cpu_offload"]},
    "prefetch": {
        depth: [f"{FSDP}forward_prefetch={depth}", f"{FSDP}backward_prefetch={depth}"]
        for depth in ("0", "1", "2")
    },
}
if torch.cuda.device_count() == 1:  # nothing is gathered, so reshard and prefetch have no effect
    CHOICES |= {"reshard": {"-": []}, "prefetch": {"-": []}}
SMALL = "dim=256 n_layers=6 n_heads=8 n_kv_heads=4 hidden_dim=1024".split()
SEQ, BATCH, RANKS = 256, 2, 2
Row = tuple[str, ...]


class Stepped(Trainer):
    """Takes single steps on one batch."""

    def with_batch(self) -> Stepped:
        tokens = torch.randint(
            256, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(self.rank_info.rank)
        )
        self.micro_batches = [MicroBatch(torch.stack([tokens[:, :-1], tokens[:, 1:]], dim=1))]
        return self

    def next_micro_batches(self) -> list[MicroBatch]:
        return self.micro_batches

    def take(self) -> float:
        dist.barrier()
        began = time.perf_counter()
        self.step += 1
        self.train_step()
        return time.perf_counter() - began


def overrides(row: Row) -> list[str]:
    return [
        word
        for choices, choice in zip(CHOICES.values(), row, strict=True)
        for word in choices[choice]
    ]


def in_turn(row: Row, steps: int, folder: str) -> tuple[float, float, int, int]:
    """Return the seconds of a step of the row and of the baseline, and the peak bytes of both."""
    small = [*QUIET, *(f"--model.overrides.{size}" for size in SMALL), f"--training.seq_len={SEQ}"]
    small += [
        f"--training.local_batch_size={BATCH}",
        "--training.steps=1000",
        "--metrics.log_freq=1000",
    ]
    both = [
        trainer([*small, *overrides(one)], f"{folder}/{n}", kind=Stepped)
        for n, one in enumerate((row, BASELINE))
    ]
    seconds: list[list[float]] = [[], []]
    peaks = []
    for run in both:
        assert isinstance(run, Stepped)
        run.with_batch().take()
        peaks.append(counted_peak(run))
    for _ in range(steps):
        for run, taken in zip(both, seconds, strict=True):
            assert isinstance(run, Stepped)
            taken.append(run.take())
    return median(seconds[0]), median(seconds[1]), peaks[0], peaks[1]


def counted_peak(run: Stepped) -> int:
    """Return the peak bytes of a step above what stays allocated between steps."""
    counted = count_later_step(run.runner, run.micro_batches)
    return counted.peak - sum(
        counted.static[kind] for kind in ("parameters", "optimizer", "buffers")
    )


BASELINE = tuple(next(iter(choices)) for choices in CHOICES.values())


def on_cpu(row: Row, steps: int, folder: str, pool: Pool) -> dict[str, float]:
    seconds, baseline, peak, baseline_peak = pool.run(
        in_turn, row, steps, folder, world=RANKS, timeout=600
    )[0]
    return {"time": seconds / baseline, "memory": peak / baseline_peak}


def on_gpus(row: Row, steps: int, job: list[str], baseline: dict[str, Any]) -> dict[str, float]:
    found = measure(["--training.mixed_precision_param=bfloat16", *job, *overrides(row)], steps)
    baseline = baseline or found
    return {
        "time": found["step_seconds"] / baseline["step_seconds"],
        "memory": found["peak_gib"] / baseline["peak_gib"],
        "step_seconds": found["step_seconds"],
        "peak_gib": found["peak_gib"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--json", type=Path)
    arguments, job = parser.parse_known_args()
    gpu, found = torch.cuda.is_available(), dict[str, dict[str, float]]()
    print(" ".join(f"{column:>9}" for column in (*CHOICES, "memory", "time")))
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        pool = Pool(RANKS, ["titanlite.train.trainer", "torch._dynamo"])
        for row in product(*CHOICES.values()):
            name = ", ".join(
                f"{column} {choice}" for column, choice in zip(CHOICES, row, strict=True)
            )
            first = next(iter(found.values()), {})
            try:
                found[name] = (
                    on_gpus(row, arguments.steps, job, first)
                    if gpu
                    else on_cpu(row, arguments.steps, folder, pool)
                )
            except RuntimeError as error:  # for example too large for this GPU
                if row == BASELINE:
                    raise
                print(
                    " ".join(f"{choice:>9}" for choice in row),
                    str(error).splitlines()[-1],
                    flush=True,
                )
                continue
            shown = f"{found[name]['memory']:>9.2f} {found[name]['time']:>9.2f}"
            print(" ".join(f"{choice:>9}" for choice in row), shown, flush=True)
            if arguments.json:
                keep(arguments.json, "memory and speed", found)
        pool.close()


if __name__ == "__main__":
    main()
