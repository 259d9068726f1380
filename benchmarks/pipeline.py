"""Compare real schedules with the table of bubbles: python benchmarks/pipeline.py [--nap 0.04]

Four processes have stages that only sleep (one nap for a forward pass and for each half of a
backward pass), so two cores are enough. Prints how long torch's schedules take, and the time that
the closed form of the bubble predicts. Overlap of computing and sending needs several GPUs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from titanlite.config.pipeline_order import bubble
from titanlite.config.stages import SINGLE, V_SHAPED, Stages, stages_of_ranks

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


def run_naps(rank: int, folder: str, micro_batches: int, nap: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS
    )
    for schedule in SCHEDULES:
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
            for index in plan.ranks[rank]
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
        if rank == 0:
            waits = bubble(plan)
            work = 3 * nap * micro_batches
            expected, measured = work / (1 - waits), statistics.median(times[1:])
            print(
                f"{schedule:<22} bubble {waits:6.1%}  predicted {expected:6.3f} s  "
                f"measured {measured:6.3f} s ({measured / expected - 1:+.1%}), "
                f"bubble by measurement {1 - work / measured:6.1%}",
                flush=True,
            )
    dist.destroy_process_group()


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
    arguments = parser.parse_args()
    print(
        f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, "
        f"torch {torch.__version__}",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_naps, (folder, arguments.micro_batches, arguments.nap), nprocs=RANKS)
    print(f"load after: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
