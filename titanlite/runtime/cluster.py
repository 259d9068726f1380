"""Where this process stands among nodes and ranks, read from the environment. No torch.

Three tongues are understood: plain variables (NNODES NODE_RANK MASTER_ADDR MASTER_PORT, and a worker's RANK
WORLD_SIZE LOCAL_RANK), Kubeflow's PET_*, and SLURM_*.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from titanlite.errors import UserError

DEFAULT_PORT = 29500


@dataclass(frozen=True)
class Nodes:
    """The nodes of a job as one launcher sees them."""

    count: int
    rank: int
    master_addr: str
    master_port: int
    source: str
    """Which variables said so."""


@dataclass(frozen=True)
class RankInfo:
    """A worker's place in the job."""

    rank: int
    world: int
    local_rank: int
    host: str


def nodes(environ: Mapping[str, str]) -> Nodes:
    """The nodes that the environment announces; one where it announces none."""
    if "NNODES" in environ:
        source, prefix = "NNODES, NODE_RANK, MASTER_ADDR", ""
    elif "PET_NNODES" in environ:
        source, prefix = "PET_*", "PET_"
    elif _number(environ, "SLURM_NNODES", 1) > 1 or _number(environ, "SLURM_STEP_NUM_TASKS", 1) > 1:
        return _slurm_nodes(environ)
    else:
        return Nodes(1, 0, "127.0.0.1", 0, "no cluster variables")
    count = _number(environ, f"{prefix}NNODES", 1)
    if count == 1:
        return Nodes(1, 0, "127.0.0.1", 0, source)
    endpoint = environ.get("PET_RDZV_ENDPOINT", "") if prefix else ""
    host, _, port = endpoint.partition(":")
    addr = environ.get(f"{prefix}MASTER_ADDR") or environ.get("MASTER_ADDR") or host
    if not addr:
        raise UserError(
            f"{prefix}NNODES={count} announces several nodes, but MASTER_ADDR is not set: "
            "it is the host name of the node with NODE_RANK=0, the same on all nodes"
        )
    if f"{prefix}NODE_RANK" not in environ:
        raise UserError(
            f"{prefix}NNODES={count} announces several nodes, but {prefix}NODE_RANK is not set: 0 to {count - 1}"
        )
    rank = _number(environ, f"{prefix}NODE_RANK", 0)
    if rank >= count:
        raise UserError(f"{prefix}NODE_RANK={rank} must be from 0 to {count - 1}, since {prefix}NNODES={count}")
    default_port = int(port) if port.isdigit() else _number(environ, "MASTER_PORT", DEFAULT_PORT)
    return Nodes(count, rank, addr, _number(environ, f"{prefix}MASTER_PORT", default_port), source)


def _slurm_nodes(environ: Mapping[str, str]) -> Nodes:
    count = _number(environ, "SLURM_NNODES", 1)
    tasks = _number(environ, "SLURM_STEP_NUM_TASKS", count)
    if tasks > count:
        raise UserError(
            f"srun started {tasks} launchers on {count} node{'s' * (count > 1)}: use --ntasks-per-node=1, "
            "or run `python -m titanlite.train` for one task per GPU"
        )
    addr, port = _slurm_master(environ)
    return Nodes(count, _number(environ, "SLURM_NODEID", 0), addr, port, "SLURM_*")


def _slurm_master(environ: Mapping[str, str]) -> tuple[str, int]:
    """The first node of the job, and a port that other jobs on it are unlikely to use."""
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    first = re.match(r"([^,\[]+)(?:\[(\d+))?", hosts)  # node[07-12,15],other -> node07
    addr = environ.get("MASTER_ADDR") or (first.group(1) + (first.group(2) or "") if first else "")
    if not addr:
        raise UserError("SLURM announces several nodes, but neither SLURM_JOB_NODELIST nor MASTER_ADDR is set")
    job = _number(environ, "SLURM_JOB_ID", 0)
    return addr, _number(environ, "MASTER_PORT", 20000 + job % 10000)


def rank_info(environ: Mapping[str, str]) -> RankInfo:
    """This worker's place; alone where the environment says nothing. torchrun and srun both will do."""
    host = socket.gethostname()
    if "RANK" in environ and "WORLD_SIZE" in environ:
        rank, world, local = "RANK", "WORLD_SIZE", "LOCAL_RANK"
    elif _number(environ, "SLURM_STEP_NUM_TASKS", 1) > 1:
        rank, world, local = "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"
    else:
        return RankInfo(0, 1, 0, host)
    return RankInfo(_number(environ, rank, 0), _number(environ, world, 1), _number(environ, local, 0), host)


def store_address(environ: Mapping[str, str], world: int) -> tuple[str, int] | None:
    """Where the ranks of a job that was not started by an elastic agent meet; None for a rank alone."""
    if world == 1:
        return None
    if "RANK" not in environ:
        return _slurm_master(environ)
    if "MASTER_ADDR" not in environ:
        raise UserError(f"WORLD_SIZE={world} announces several ranks, but MASTER_ADDR is not set")
    return environ["MASTER_ADDR"], _number(environ, "MASTER_PORT", DEFAULT_PORT)


def processes(environ: Mapping[str, str], device: str, gpus: int) -> int:
    """Workers on this node: NGPU, else one per GPU, else two on the CPU."""
    if "NGPU" in environ:
        return _number(environ, "NGPU", 1, least=1)
    if environ.get("PET_NPROC_PER_NODE", "").isdigit():
        return _number(environ, "PET_NPROC_PER_NODE", 1, least=1)
    return gpus if device == "cuda" else min(2, cores())


def cores() -> int:
    """Cores that this process may use: by affinity, and by a container's quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = Path("/sys/fs/cgroup/cpu.max")
    quota, _, period = limit.read_text().partition(" ") if limit.is_file() else ("max", "", "")
    return min(count, max(1, int(quota) // int(period))) if quota.isdigit() else count


def gpus(environ: Mapping[str, str]) -> int:
    """NVIDIA GPUs that this process may use, counted without torch."""
    if "CUDA_VISIBLE_DEVICES" in environ:
        listed = [part.strip() for part in environ["CUDA_VISIBLE_DEVICES"].split(",")]
        return len([part for part in listed if part and part != "-1"])
    if nodes := [p for p in Path("/dev").glob("nvidia*") if p.name[6:].isdigit()]:
        return len(nodes)
    if shutil.which("nvidia-smi"):  # WSL has no device nodes
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
        return len([line for line in listing.stdout.splitlines() if line.startswith("GPU ")])
    return 0


def gpu_bytes() -> int | None:
    """Memory of the smallest GPU; None if unknown."""
    return min((int(mebibytes) << 20 for mebibytes in _of_gpus("memory.total") if mebibytes.isdigit()), default=None)


def gpu_capability() -> tuple[int, int] | None:
    """Compute capability of the oldest GPU; None if unknown."""
    found = [word.split(".") for word in _of_gpus("compute_cap") if re.fullmatch(r"\d+\.\d+", word)]
    return min(((int(major), int(minor)) for major, minor in found), default=None)


def _of_gpus(field: str) -> list[str]:
    """Asked of the driver: torch would take some of their memory to answer."""
    if not shutil.which("nvidia-smi"):
        return []
    query = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()


def shown_ranks(environ: Mapping[str, str]) -> set[int]:
    """Ranks whose output is shown: LOG_RANK, one or several with commas between."""
    text = environ.get("LOG_RANK") or "0"
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise UserError(f"LOG_RANK={text} must be a rank, or several with commas between")
    return set(map(int, text.split(",")))


def _number(environ: Mapping[str, str], name: str, default: int, least: int = 0) -> int:
    text = environ.get(name, "")
    if not text:
        return default
    if not text.isdigit() or int(text) < least:
        raise UserError(f"{name}={text} must be a whole number >= {least}")
    return int(text)


def check_torch() -> None:
    """Refuse a torch older than pyproject.toml allows, before its import fails in some other way; warn of a newer."""
    try:
        found = version("torch")
    except PackageNotFoundError:
        raise UserError("torch is not installed in this environment: pip install torch") from None
    try:
        requirement = next(line for line in requires("titanlite") or () if re.match("torch[<>]", line))
    except PackageNotFoundError:
        return  # a checkout on PYTHONPATH, not installed: nothing says the range
    low, high = sorted(_major_minor(limit) for limit in re.findall(r"[\d.]+", requirement))
    if _major_minor(found) < low:
        raise UserError(f"torch {found} is too old: titanlite needs {requirement}")
    if _major_minor(found) >= high:
        print(f"titanlite: torch {found} is newer than any that was tested ({requirement})", file=sys.stderr)


def _major_minor(version_text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version_text.split(".")[:2])
