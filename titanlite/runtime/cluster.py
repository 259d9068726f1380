"""A rank of the job, read from the environment (torchrun's variables or SLURM_*), and its cores.
Imports no torch.
"""

import math
import os
import re
import resource
import socket
import subprocess
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from titanlite.errors import UserError, install_command, print_notice

DEFAULT_PORT = 29500
PORTS = (1, 65535)
RESOLVER = "timeout:1 attempts:1"
"""Options for name lookups in runs of several hosts.

Torch's store looks up the name of each client in its only thread. If no name server answers, each
lookup takes 10 s by default, and nodes would count as lost. Without a name the address is used.
"""
DRIVER_SECONDS = 30
"""Time limit of nvidia-smi, which never ends if the driver is broken."""


def ask_driver(*arguments: str) -> str:
    """Return the output of nvidia-smi, or an empty string if it is missing; raise UserError if it
    does not end.
    """
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=DRIVER_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"nvidia-smi did not answer in {DRIVER_SECONDS} s") from None
    except OSError:
        return ""
    return done.stdout


@dataclass(frozen=True)
class RankInfo:
    """A worker's rank in the job and on its node."""

    rank: int
    world: int
    local_rank: int
    host: str


def rank_info(environ: Mapping[str, str]) -> RankInfo:
    """Return this worker's rank from the variables of torchrun or srun; without any, it is the only
    one.
    """
    if environ.get("RANK") and environ.get("WORLD_SIZE"):
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    elif read_number(environ, "SLURM_STEP_NUM_TASKS", 1) > 1:
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
    else:
        return RankInfo(0, 1, 0, socket.gethostname())
    rank, world, local_rank = (read_number(environ, name, 0) for name in names)
    return RankInfo(rank, world or 1, local_rank, socket.gethostname())


def set_defaults(environ: MutableMapping[str, str]) -> None:
    """Configure torch's allocator and Triton, before their import, unless the user has done so."""
    if "PYTORCH_CUDA_ALLOC_CONF" not in environ:  # the older name
        environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # Triton 3.10 changes the default, and with it the numbers of compiled code.
    environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


def store_address(environ: Mapping[str, str], world: int) -> tuple[str, int] | None:
    """Return host and port of the ranks' store, or None for a single rank."""
    if world == 1:
        return None
    if not environ.get("RANK"):
        return slurm_master(environ)
    if not environ.get("MASTER_ADDR"):
        raise UserError(f"WORLD_SIZE={world}, but MASTER_ADDR is not set")
    return environ["MASTER_ADDR"], read_number(environ, "MASTER_PORT", DEFAULT_PORT, *PORTS)


def slurm_master(environ: Mapping[str, str]) -> tuple[str, int]:
    """Return the first node of the job, and a port that other jobs on it are unlikely to use."""
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    first = re.match(r"([^,\[]+)(?:\[(\d+))?", hosts)  # node[07-12,15],other -> node07
    address = environ.get("MASTER_ADDR", "")
    if not address and first:
        address = first[1] + (first[2] or "")
    if not address:
        raise UserError(
            "SLURM started several nodes, but neither SLURM_JOB_NODELIST nor MASTER_ADDR is set"
        )
    job = read_number(environ, "SLURM_JOB_ID", 0)
    return address, read_number(environ, "MASTER_PORT", 20000 + job % 10000, *PORTS)


def read_number(
    environ: Mapping[str, str], name: str, default: int, least: int = 0, most: float = math.inf
) -> int:
    """Return a variable as a whole number; raise UserError if it is not one, or out of range."""
    text = environ.get(name, "")
    if not text:
        return default
    if not text.isdigit() or not least <= int(text) <= most:
        legal = f">= {least}" if most == math.inf else f"from {least} to {most}"
        raise UserError(f"{name}={text} must be a whole number {legal}")
    return int(text)


def shown_ranks(environ: Mapping[str, str]) -> set[int]:
    """Return the ranks whose output is shown: LOG_RANK, one or several separated by commas."""
    text = environ.get("LOG_RANK") or "0"
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise UserError(f"LOG_RANK={text} must be a rank, or several with commas between")
    return set(map(int, text.split(",")))


def cores() -> int:
    """Return the cores that this process may use, by its affinity and its container's quota."""
    count = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    limit = Path("/sys/fs/cgroup/cpu.max")
    if limit.is_file():
        quota, _, period = limit.read_text().partition(" ")
        if quota.isdigit():
            count = min(count, max(1, int(quota) // int(period)))
    return count


def raise_file_limit() -> None:
    """Allow this process as many open files as the system permits, for a connection per rank."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # macOS has a lower limit of its own
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 1 << 16)), hard))


def check_torch() -> None:
    """Refuse a torch older than pyproject.toml allows, before its import fails in some other way;
    warn about a newer one.
    """
    try:
        installed = version("torch")
        requirements = requires("titanlite") or ()
    except PackageNotFoundError as error:
        if error.name == "torch":
            raise UserError(
                f"torch is not installed in this environment: {install_command('torch')}"
            ) from None
        return  # a checkout on PYTHONPATH, not installed, has no range
    requirement = next(line for line in requirements if re.match("torch[<>]", line))
    low, high = sorted(_major_minor(limit) for limit in re.findall(r"[\d.]+", requirement))
    if _major_minor(installed) < low:
        raise UserError(f"torch {installed} is too old: titanlite needs {requirement}")
    if _major_minor(installed) >= high:
        print_notice(f"torch {installed} is newer than any that was tested ({requirement})")


def _major_minor(version_text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version_text.split(".")[:2])
