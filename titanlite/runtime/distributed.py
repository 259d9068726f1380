"""The device of a rank, the process group of a job, and the timeouts of collectives."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from titanlite.config.schema import Comm, JobConfig
from titanlite.errors import UserError, print_notice
from titanlite.runtime import torch_private
from titanlite.runtime.cluster import (
    RESOLVER,
    RankInfo,
    raise_file_limit,
    read_number,
    store_address,
)
from titanlite.runtime.rank_files import ATTEMPT, attempt_prefix, outlives_attempts

T = TypeVar("T")
SHARED_STORE = (
    "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun on several nodes: "
    "after a restart ranks may not find each other in the store that its agents share"
)
WATCH_SECONDS = 15
"""Margin that lets a hang be reported before collectives time out."""


def pick_device(choice: str, local_rank: int) -> torch.device:
    """Return the device of a rank for a value of job.device; raise UserError if there is none."""
    if choice == "cpu" or (choice == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError('job.device = "cuda", but torch finds no usable GPU on this node')
    if torch.cuda.device_count() == 1:  # srun can give each task only its own GPU
        local_rank = 0
    if local_rank >= torch.cuda.device_count():
        raise UserError(
            f"local rank {local_rank} has no GPU: this node has {torch.cuda.device_count()}"
        )
    return torch.device("cuda", local_rank)


def shared_device(local_rank: int, local_world: int) -> torch.device:
    """Return the GPU of a rank on a node that may have more ranks than GPUs."""
    gpus = torch.cuda.device_count()
    if gpus < local_world:
        # NCCL refuses two ranks of one host on a GPU, but not of two hosts.
        os.environ["NCCL_HOSTID"] = f"rank{local_rank}"
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    return torch.device("cuda", local_rank % gpus)


def stay_near(device: torch.device, devices: Path = Path("/sys/bus/pci/devices")) -> None:
    """Pin this thread, and those that it starts, to the cores of the GPU's NUMA node that it may
    use.
    """
    gpu: Any = torch.cuda.get_device_properties(device)  # torch's stubs lack these names
    address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    with suppress(OSError, ValueError):  # a virtual machine may not say
        ranges = (devices / address / "local_cpulist").read_text().strip().split(",")
        bounds = [tuple(map(int, each.split("-"))) for each in ranges]
        near = set()
        for each in bounds:
            near.update(range(each[0], each[-1] + 1))
        os.sched_setaffinity(0, near & os.sched_getaffinity(0))  # fails if no core is left


@contextmanager
def process_group(
    rank: RankInfo, device: torch.device, comm: Comm, dump_folder: Path, environ: Mapping[str, str]
) -> Iterator[None]:
    """Create the job's process group, and destroy it on success."""
    backend = "gloo"
    gpu = None
    if device.type == "cuda":
        torch.cuda.set_device(device)
        stay_near(device)
        backend = "cuda:nccl,cpu:gloo"
        gpu = device
        traces = dump_folder / comm.save_traces_folder  # NCCL's flight recorder reads these
        traces.mkdir(parents=True, exist_ok=True)
        # The user may have set the older names, which the newer ones would override.
        if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:
            os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(comm.trace_buf_size))
        if "TORCH_NCCL_DEBUG_INFO_TEMP_FILE" not in os.environ:
            os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(traces / "rank_"))
        recorder = "FR" if torch.__version__ >= "2.15" else "NCCL"
        os.environ.setdefault(f"TORCH_{recorder}_DUMP_ON_TIMEOUT", "1")
        # With the elastic agent's default the record can be lost (pytorch#121055).
        if os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == "1":
            os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "3"
    torch_private.give_gloo_groups_one_thread()
    raise_file_limit()
    if read_number(environ, "LOCAL_WORLD_SIZE", rank.world) < rank.world:
        # Otherwise all ranks of a group connect to each other when it is created, which takes
        # minutes for 1,000 ranks.
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
        os.environ.setdefault("RES_OPTIONS", RESOLVER)
        if rank.rank == 0 and outlives_attempts(environ) and not environ.get(ATTEMPT):
            print_notice(SHARED_STORE)
    store = _store(rank, environ, timedelta(seconds=comm.init_timeout_seconds))
    timeout = collective_timeout(comm.init_timeout_seconds)
    dist.init_process_group(
        backend, store=store, rank=rank.rank, world_size=rank.world, timeout=timeout, device_id=gpu
    )
    yield
    # Only on success: with peers stuck in a collective this would block and hide the error.
    dist.destroy_process_group()


def write_flight_record(config: JobConfig, rank: int) -> None:
    """Write this rank's record of collectives on a GPU, for `titanlite doctor --traces`."""
    if torch.cuda.is_initialized():
        folder = Path(config.job.dump_folder, config.comm.save_traces_folder)
        (folder / f"rank_{rank}").write_bytes(torch_private.flight_record())


def _store(rank: RankInfo, environ: Mapping[str, str], timeout: timedelta) -> dist.Store:
    """Return the store through which the ranks find each other."""
    address = store_address(environ, rank.world)
    if address is None:
        return dist.HashStore()
    if outlives_attempts(environ):  # without a prefix the next one would find stale addresses
        store = dist.TCPStore(*address, is_master=False, timeout=timeout)
        return dist.PrefixStore(attempt_prefix(environ), store)
    return dist.TCPStore(*address, rank.world, is_master=rank.rank == 0, timeout=timeout)


def collective_timeout(seconds: float) -> timedelta:
    """Return the timeout of collectives for a phase limit. It is longer, so that the report of a
    hang, which names the rank, comes first."""
    return timedelta(seconds=seconds + WATCH_SECONDS)


def set_collective_timeout(seconds: float, excluded: dist.ProcessGroup | None = None) -> None:
    """Change the timeout of every process group but one, including those that FSDP2 creates."""
    for group in torch_private.process_groups():
        if group is not excluded:
            group.set_timeout(collective_timeout(seconds))


def rank_in(group: dist.ProcessGroup | None) -> int:
    return dist.get_rank(group) if group else 0


def gather_on_rank_0(value: T) -> list[T]:
    """Return every rank's value on rank 0; on other ranks only their own."""
    return gather_objects(value, dist.group.WORLD, only_rank_0=True)


def on_any_rank(device: torch.device, *flags: bool) -> list[bool]:
    """Return which flags are set on any rank."""
    found = torch.tensor(flags, dtype=torch.int64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return [bool(each) for each in found.tolist()]


def gather_objects(value: T, group: dist.ProcessGroup | None, only_rank_0: bool = False) -> list[T]:
    """Return every rank's value, on every rank of the group or only on rank 0. Without a group
    there is only this process.
    """
    if not group:
        return [value]
    values = [value] * dist.get_world_size(group)
    if not only_rank_0:
        dist.all_gather_object(values, value, group=group)
    elif rank_in(group) == 0:
        dist.gather_object(value, values, group=group)
    else:
        dist.gather_object(value, group=group)
        return [value]
    return values
