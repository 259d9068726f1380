"""A step beside the bookkeeping of a save: python benchmarks/scale/beside.py [--pairs 200]
[--times 1]

Rank 0's work for the tensors of Llama 405B with AdamW on 512 ranks, all of it but the network and
the bytes, runs in a thread, as in a save, while the main thread takes a step; every other step is
without. With --times a step is a small one so many times: that of 405B on 512 GPUs takes more than
ten seconds. Prints the ratio of steps by the clock, and the seconds of the bookkeeping alone."""

from __future__ import annotations

import argparse
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard  # noqa: E402
from torch.distributed.tensor.placement_types import _StridedShard  # noqa: E402
from torch.futures import Future  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from benchmarks.ratios import ratio  # noqa: E402
from benchmarks.usual import timed_step  # noqa: E402
from tests.checkpoint.test_places import large  # noqa: E402
from titanlite.checkpoint import commit  # noqa: E402
from titanlite.checkpoint.manifest import File, Manifest  # noqa: E402
from titanlite.checkpoint.places import rank_file  # noqa: E402
from titanlite.checkpoint.plan import Planner, nested  # noqa: E402

SHARDS, TP = 64, 8


def shards() -> dict[str, torch.Tensor]:
    """Return rank 0's parts of all tensors, without their bytes."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=SHARDS * TP)
    mesh = init_device_mesh("cpu", (SHARDS, TP), mesh_dim_names=("fsdp", "tp"))
    described = large(SHARDS, TP)
    found = dict[str, torch.Tensor]()
    for name, tensor in described.items():
        split = len(tensor.layout.splits) == 2
        placements = (_StridedShard(0, split_factor=TP), Shard(0))
        if not split:
            placements = (Shard(0), Replicate())
        whole = torch.empty(tensor.shape, device="meta")
        rows = -(-tensor.shape[0] // (SHARDS * TP if split else SHARDS))
        local = torch.empty((rows, *tensor.shape[1:]), device="meta")
        found[name] = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )
    return found


class Bookkeeper(commit.Writer):
    """Does what rank 0 does in a save, for the other ranks too, without the bytes."""

    def write_data(self, plan: dcp.SavePlan, planner: Any) -> Future[Any]:
        for item in plan.items:
            planner.resolve_data(item)
        files = {rank_file(rank): File(1 << 32, 1 << 31) for rank in range(SHARDS * TP)}
        Manifest(1, False, files, planner.places).render()
        done = Future[Any]()
        done.set_result([])
        return done


def bookkeeping(tensors: dict[str, torch.Tensor], planner: Planner) -> float:
    """Save, and return the processor seconds."""
    began = time.thread_time()
    content = commit.Content(1, None, lambda _: {}, weights_only=False)
    writer = Bookkeeper(Path("nowhere"), content)
    commit.alone(dcp.save, nested(tensors), storage_writer=writer, planner=planner)
    return time.thread_time() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--times", type=int, default=1)
    arguments = parser.parse_args()
    pairs = arguments.pairs
    tensors = shards()
    small_step = timed_step()

    def step() -> float:
        return sum(small_step() for _ in range(arguments.times))

    planner = Planner()
    first = min(bookkeeping(tensors, each) for each in [planner, *map(Planner, [None] * 4)])
    later = min(bookkeeping(tensors, planner) for _ in range(5))
    for _ in range(3):
        step()
    beside, without = list[float](), list[float]()
    for _ in range(pairs):
        thread = threading.Thread(target=bookkeeping, args=(tensors, planner))
        thread.start()
        beside.append(step())
        thread.join()
        without.append(step())
    middle = sorted(without)[pairs // 2]
    share = ratio(beside, without)
    print(
        f"bookkeeping: {1e3 * first:.0f} ms in the first save, {1e3 * later:.0f} ms in a later one"
    )
    print(f"a step of {1e3 * middle:.0f} ms beside it takes {share} of one without")


if __name__ == "__main__":
    main()
