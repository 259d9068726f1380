"""How fast the ranks reach each other: before the model is built, an all-reduce over each dimension
of the mesh is timed.
"""

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
"""The divisor of a first, shorter transfer."""
REPEATS = 3
LONGEST_SECONDS = 0.25
"""Fewer bytes are sent where a transfer would take longer than this."""


def check_network(mesh: DeviceMesh, device: torch.device, facts: Sequence[RankFacts]) -> list[str]:
    """Return the lines of the preflight on rank 0, which has the facts, and elsewhere nothing.

    A later attempt of a launcher does not time its network again.
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

    All groups of a dimension run at once, and the slowest counts. The bandwidth is what each rank
    sends, as nccl-tests counts it."""
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
    """Return the bytes that a transfer was given, equal on all ranks, and this rank's best time.

    All ranks begin each together.
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
    seconds(probe)  # connects
    slowest = _largest(seconds(probe), device)
    share = min(1.0, LONGEST_SECONDS / (PROBE * slowest))
    data = data[: max(1, int(share * len(data)))]
    repeats = REPEATS if slowest < LONGEST_SECONDS else 1
    return data.nbytes, min(seconds(data) for _ in range(repeats))


def _largest(seconds: float, device: torch.device) -> float:
    """Return the largest of the ranks' times, on all ranks."""
    value = torch.tensor(seconds, device=device)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()
