"""Memory of a rank: what the model's state needs, what was used, what the machine has."""

from __future__ import annotations

import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

GIB = 1 << 30


@dataclass(frozen=True)
class Used:
    """Peak memory of this rank, and what it is a share of."""

    gib: float
    percent: float


def state_bytes(elements: int, trained: int, element_size: int, optimizer: int) -> tuple[int, int, int]:
    """Bytes of parameters, gradients and optimizer state."""
    return elements * element_size, trained * element_size, optimizer


def machine_bytes() -> int:
    """The machine's memory, or the part of it that this container may use."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return min(total, int(text)) if text.isdigit() else total


def used(device: torch.device) -> Used:
    """Peak of allocated device memory; on a CPU the process's peak resident set."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        total = torch.cuda.get_device_properties(device).total_memory
    else:
        unit = 1 if sys.platform == "darwin" else 1024
        peak, total = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, machine_bytes()
    return Used(peak / GIB, 100 * peak / total)


def allocator_tags(device: torch.device) -> dict[str, float]:
    """TensorBoard's memory tags."""
    peak = used(device)
    tags = {"memory/max_active(GiB)": peak.gib, "memory/max_active(%)": peak.percent}
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        total = torch.cuda.get_device_properties(device).total_memory
        active, reserved = stats["active_bytes.all.peak"], stats["reserved_bytes.all.peak"]
        tags = {
            "memory/max_active(GiB)": active / GIB,
            "memory/max_active(%)": 100 * active / total,
            "memory/max_reserved(GiB)": reserved / GIB,
            "memory/max_reserved(%)": 100 * reserved / total,
            "memory/num_alloc_retries": stats["num_alloc_retries"],
            "memory/num_ooms": stats["num_ooms"],
        }
    return tags


class Retries:
    """Tells when the device's allocator had to give its cache back to find memory, which waits for the device."""

    def __init__(self) -> None:
        self._told = 0.0

    def news(self, tags: dict[str, float]) -> str:
        """What happened since this was asked last, by the allocator's tags; empty if nothing did."""
        retries = tags.get("memory/num_alloc_retries", 0.0)
        more, self._told = retries - self._told, retries
        if more <= 0:
            return ""
        return (
            f"memory is nearly full: since the last logged step the allocator gave its cache back {more:.0f} "
            f"time{'s' * (more > 1)} to find some, which waits for the device; activation_checkpoint, "
            "training.loss_chunks or a smaller training.local_batch_size take less"
        )
