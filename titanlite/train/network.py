"""Time an all-reduce over each dimension of the mesh, before the model is built."""

import os
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from titanlite.runtime.cluster import read_number
from titanlite.runtime.rank_files import ATTEMPT
from titanlite.train.rank_facts import RankFacts, agreement, notable

BYTES = 8_000_000
PROBE = 64
"""A first transfer is this many times smaller."""
REPEATS = 3
LONGEST_SECONDS = 0.25
"""Fewer bytes are sent if a transfer would take longer than this."""


def check_network(mesh: DeviceMesh, device: torch.device, facts: Sequence[RankFacts]) -> list[str]:
    """Return the preflight's lines on rank 0, which has the facts, and nothing on other ranks.

    A launcher's later attempts do not time the network again.
    """
    parts: list[str] = []
    if read_number(os.environ, ATTEMPT, 1) == 1:
        parts = time_groups(mesh, device)
    if dist.get_rank() > 0:
        return []
    lines = [f"preflight  {agreement(facts)}"]
    if parts:
        lines.append(f"network    all-reduce over {'; '.join(parts)}")
    return lines + [f"warning: {line}" for line in notable(facts)]


def time_groups(mesh: DeviceMesh, device: torch.device) -> list[str]:
    """Return the time of an all-reduce over each dimension and its bandwidth.

    All groups of a dimension run at once, and the slowest counts. The bandwidth is that of each
    rank's sends, as in nccl-tests."""
    parts = []
    for name, ranks in zip(mesh.mesh_dim_names or (), mesh.shape, strict=True):
        if ranks == 1:
            continue
        size, own = shortest_time(partial(dist.all_reduce, group=mesh.get_group(name)), device)
        seconds = _largest(own, device)
        bandwidth = 2 * (ranks - 1) / ranks * size / seconds
        took = f"{size / 1e6:.2g} MB in {1e3 * seconds:.3g} ms"
        parts.append(f"{name} {ranks}: {took}, {bandwidth / 1e9:.2g} GB/s")
    return parts


def shortest_time(
    transfer: Callable[[torch.Tensor], object], device: torch.device
) -> tuple[int, float]:
    """Return the bytes of a transfer, equal on all ranks, and this rank's best time.

    All ranks start each transfer together.
    """

    def seconds(part: torch.Tensor) -> float:
        dist.barrier()
        start = time.perf_counter()
        transfer(part)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    data = torch.zeros(BYTES // 4, device=device)
    probe = data[: len(data) // PROBE]
    seconds(probe)  # connects the ranks
    slowest = _largest(seconds(probe), device)
    share = min(1.0, LONGEST_SECONDS / (PROBE * slowest))
    data = data[: max(1, int(share * len(data)))]
    repeats = 1
    if slowest < LONGEST_SECONDS:
        repeats = REPEATS
    return data.nbytes, min(seconds(data) for _ in range(repeats))


def _largest(seconds: float, device: torch.device) -> float:
    """Return the largest of the ranks' times, on all ranks."""
    value = torch.tensor(seconds, device=device)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()
