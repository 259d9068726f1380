"""Measure what the table of bubbles leaves out.

    python benchmarks/pipeline.py [--nap 0.04] [--micro-batches 8] [--json FILE]

Four processes have stages that only sleep (one nap for a forward pass and for each half of a
backward pass), so two cores are enough. Prints how long torch's schedules take, and the time that
the closed form of the bubble predicts. Overlap of computing and sending needs several GPUs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from benchmarks.harness import keep
from titanlite.config.pipeline_order import bubble
from titanlite.config.stages import SINGLE, V_SHAPED, Stages, stages_of_ranks
from titanlite.verify.pool import Pool

RANKS, STEPS = 4, 3
SCHEDULES = (*SINGLE, "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", *V_SHAPED)


class Nap(torch.autograd.Function):
    """The identity, whose gradient takes a nap."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return gradient.contiguous(), None


class Sleeper(nn.Module):
    """A stage without work; the gradients of its input and of its weight take a nap each."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.weight = seconds, nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return Nap.apply(x, self.seconds) + Nap.apply(self.weight, self.seconds)


def stages_of(schedule: str, micro_batches: int) -> Stages:
    number = RANKS * (1 if schedule in SINGLE else 2)
    names = tuple((f"layers.{i}",) for i in range(number))
    return Stages(names, stages_of_ranks(schedule, RANKS, number), schedule, micro_batches, 1)


def median_step(schedule: str, micro_batches: int, nap: float) -> float:
    """Return the seconds of a step, the median of some, on a rank of the pool."""
    plan = stages_of(schedule, micro_batches)
    seconds = nap / (len(plan.names) // RANKS)
    like = torch.zeros(1, 8, requires_grad=True)
    parts = [
        PipelineStage(
            submodule=Sleeper(seconds),
            stage_index=index,
            num_stages=len(plan.names),
            device=torch.device("cpu"),
            input_args=like,
            output_args=like,
        )
        for index in plan.ranks[dist.get_rank()]
    ]
    run = get_schedule_class(schedule)(
        parts[0] if schedule in SINGLE else parts,
        n_microbatches=micro_batches,
        loss_fn=lambda output, target: output.sum(),
        scale_grads=False,
    )
    data, times = torch.zeros(micro_batches, 8), []
    for _ in range(1 + STEPS):
        dist.barrier()
        start = time.perf_counter()
        inputs = (data,) if any(part.is_first for part in parts) else ()
        run.step(*inputs, target=data)
        dist.barrier()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--nap",
        type=float,
        default=0.04,
        help="seconds of a rank's forward pass of one micro-batch",
    )
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    work = 3 * arguments.nap * arguments.micro_batches
    found = {}
    pool = Pool(RANKS, ["torch.distributed.pipelining.schedules"])
    for schedule in SCHEDULES:
        given = schedule, arguments.micro_batches, arguments.nap
        measured = pool.run(median_step, *given, timeout=600)[0]
        waits = bubble(stages_of(schedule, arguments.micro_batches))
        expected = work / (1 - waits)
        print(
            f"{schedule:<22} bubble {waits:6.1%}  predicted {expected:6.3f} s  "
            f"measured {measured:6.3f} s ({measured / expected - 1:+.1%})",
            flush=True,
        )
        found[schedule] = {"bubble": waits, "predicted": expected, "measured": measured}
    pool.close()
    if arguments.json:
        keep(arguments.json, found)


if __name__ == "__main__":
    main()
