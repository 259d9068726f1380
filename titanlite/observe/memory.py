"""Memory of a rank: the peak so far, and the machine's capacity."""

import os
import resource
import sys
from pathlib import Path

import torch

from titanlite.config.hardware_table import GIB

REMEDY = (
    "to need less: activation_checkpoint, training.loss_chunks, a smaller training.local_batch_size"
)


def machine_bytes() -> int:
    """Return the machine's memory, or this container's limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return min(total, int(text)) if text.isdigit() else total


def peak_memory(device: torch.device) -> tuple[float, float]:
    """Return the peak of a GPU's allocated memory, or of a CPU process's resident set, in GiB and
    in percent.
    """
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        total = torch.cuda.get_device_properties(device).total_memory
    else:
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        total = machine_bytes()
    return peak / GIB, 100 * peak / total


def memory_tags(device: torch.device) -> dict[str, float]:
    """Return TensorBoard's memory tags."""
    if device.type != "cuda":
        active, percent = peak_memory(device)
        return {"memory/max_active(GiB)": active, "memory/max_active(%)": percent}
    stats = torch.cuda.memory_stats(device)
    total = torch.cuda.get_device_properties(device).total_memory
    tags: dict[str, float] = {}
    for kind in ("active", "reserved"):
        peak_bytes = stats[f"{kind}_bytes.all.peak"]
        tags |= {
            f"memory/max_{kind}(GiB)": peak_bytes / GIB,
            f"memory/max_{kind}(%)": 100 * peak_bytes / total,
        }
    return tags | {f"memory/{name}": stats[name] for name in ("num_alloc_retries", "num_ooms")}


def retries_warning(retries: float, reported: float) -> str:
    """Return a warning if the GPU's allocator has flushed its cache to find memory since the last
    report, which synchronizes the device; otherwise an empty string.
    """
    added = retries - reported
    if added <= 0:
        return ""
    noun = "flush" if added == 1 else "flushes"
    return (
        f"GPU memory nearly full: {added:.0f} allocator cache {noun} "
        f"since the last logged step (each synchronizes the device); {REMEDY}"
    )
