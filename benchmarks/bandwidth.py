"""Bandwidths of the GPUs of this machine: copies on one of them, and collectives between all.

    torchrun --nproc-per-node 8 benchmarks/bandwidth.py [--mib 256] [--repeats 5]

Rank 0 prints a line for each. For a collective it is the bus bandwidth as defined by nccl-tests:
the bytes that each GPU sends or receives over its links.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

import torch
import torch.distributed as dist


def seconds(action: Callable[[], object], repeats: int) -> float:
    """Return the mean time of an action on the GPU, after a first one that connects."""
    action()
    first = torch.cuda.Event(enable_timing=True)
    last = torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    first.record()
    for _ in range(repeats):
        action()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / 1000 / repeats


def copies(size: int, device: torch.device) -> dict[str, tuple[Callable[[], object], float]]:
    """Return copies of `size` bytes by name, each with the bytes that it reads and writes."""
    on_device = torch.zeros(size, dtype=torch.uint8, device=device)
    other = torch.zeros_like(on_device)
    on_host = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
    return {
        "within the GPU": (lambda: other.copy_(on_device), 2 * size),
        "host to GPU": (lambda: on_device.copy_(on_host, non_blocking=True), size),
        "GPU to host": (lambda: on_host.copy_(on_device, non_blocking=True), size),
    }


def collectives(size: int, device: torch.device) -> dict[str, tuple[Callable[[], object], float]]:
    """Return collectives on `size` bytes by name, each with the bytes that a link carries."""
    world = dist.get_world_size()
    share = (world - 1) / world
    whole = torch.zeros(size // 4 // world * world, device=device)
    other = torch.zeros_like(whole)
    part = whole.chunk(world)[0].clone()
    right = (dist.get_rank() + 1) % world
    left = (dist.get_rank() - 1) % world

    def pass_on() -> None:
        send = dist.P2POp(dist.isend, whole, right)
        receive = dist.P2POp(dist.irecv, other, left)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()

    return {
        "all-reduce": (lambda: dist.all_reduce(whole), 2 * share * size),
        "all-gather": (lambda: dist.all_gather_into_tensor(whole, part), share * size),
        "reduce-scatter": (lambda: dist.reduce_scatter_tensor(part, whole), share * size),
        "all-to-all": (lambda: dist.all_to_all_single(other, whole), share * size),
        "to the next rank": (pass_on, size),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=256, help="size of a message")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    size = arguments.mib << 20
    dist.init_process_group("nccl", device_id=device)
    timed = copies(size, device)
    if dist.get_world_size() > 1:
        timed |= collectives(size, device)
    for name, (action, carried) in timed.items():
        rate = carried / seconds(action, arguments.repeats)
        if dist.get_rank() == 0:
            print(f"{name} {rate / 1e9:.0f} GB/s", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
