"""The device of a rank, and the process group of a job."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from titanlite.config.schema import Comm
from titanlite.errors import UserError
from titanlite.runtime.cluster import RankInfo, store_address


def pick_device(choice: str, local_rank: int) -> torch.device:
    """The device of a rank for job.device."""
    if choice == "cpu" or (choice == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError('job.device = "cuda", but torch finds no usable GPU here')
    if torch.cuda.device_count() == 1:  # srun may show each task its own GPU alone
        local_rank = 0
    if local_rank >= torch.cuda.device_count():
        raise UserError(f"local rank {local_rank} has no GPU: there are {torch.cuda.device_count()} on this node")
    return torch.device("cuda", local_rank)


@contextmanager
def process_group(
    place: RankInfo, device: torch.device, comm: Comm, dump_folder: Path, environ: Mapping[str, str]
) -> Iterator[None]:
    """The job's process group while the context lasts."""
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cuda:nccl,cpu:gloo"
        traces = dump_folder / comm.save_traces_folder  # NCCL's flight recorder reads these
        traces.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("TORCH_NCCL_TRACE_BUFFER_SIZE", str(comm.trace_buf_size))
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
        os.environ.setdefault("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(traces / "rank_"))
    timeout = timedelta(seconds=comm.init_timeout_seconds)
    dist.init_process_group(
        backend,
        store=_store(place, environ, timeout),
        rank=place.rank,
        world_size=place.world,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    yield
    # Only after success: with peers stuck in a collective this would block, and bury what went wrong.
    dist.destroy_process_group()


def _store(place: RankInfo, environ: Mapping[str, str], timeout: timedelta) -> dist.Store:
    """Where the ranks meet. An elastic agent's store outlives an attempt: stale addresses in it would be found
    by the next one, therefore every attempt has a prefix of its own."""
    address = store_address(environ, place.world)
    if address is None:
        return dist.HashStore()
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = dist.TCPStore(*address, is_master=False, timeout=timeout)
        return dist.PrefixStore(f"attempt-{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    return dist.TCPStore(*address, place.world, is_master=place.rank == 0, timeout=timeout)


def set_collective_timeout(seconds: float, spared: dist.ProcessGroup | None = None) -> None:
    """Change the timeout of every group of this process but one. (Private in torch 2.11 to 2.13; tried on both.)"""
    from torch.distributed.distributed_c10d import _set_pg_timeout, _world

    for group in _world.pg_map.keys() - {spared}:
        _set_pg_timeout(timedelta(seconds=seconds), group)
