"""The nodes of a job and this node's processes and GPUs, read from the environment and the driver.
Imports no torch.

Three families of variables are understood: NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT;
Kubeflow's PET_*; SLURM_*."""

import os
import re
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace
from pathlib import Path

from titanlite.errors import UserError, counted
from titanlite.launch.terminal import say
from titanlite.runtime.cluster import (
    DEFAULT_PORT,
    PORTS,
    ask_driver,
    cores,
    read_number,
    set_defaults,
    slurm_master,
)
from titanlite.runtime.forks import in_a_fork
from titanlite.runtime.rank_files import LAUNCHED


@dataclass(frozen=True)
class Nodes:
    """The nodes of a job as one launcher sees them."""

    count: int
    rank: int
    master_addr: str
    master_port: int
    source: str
    """The variables that describe the nodes."""
    spare: int = 0
    """Number of nodes that wait to replace lost ones."""

    @property
    def training(self) -> int:
        """Return the number of nodes that train."""
        return self.count - self.spare


def find_nodes(environ: Mapping[str, str], spare: int = 0) -> Nodes:
    """Return the nodes described by the environment, by default only this one; `spare` of them do
    not train.
    """
    nodes = _announced_nodes(environ)
    if spare and spare >= nodes.count:
        raise UserError(
            f"fault.spare_nodes = {spare} leaves no node to train: "
            f"the run has {nodes.count} (NNODES)"
        )
    return replace(nodes, spare=spare)


def _announced_nodes(environ: Mapping[str, str]) -> Nodes:
    if environ.get("NNODES"):
        source = "NNODES, NODE_RANK, MASTER_ADDR"
        prefix = ""
    elif environ.get("PET_NNODES"):
        source = "PET_*"
        prefix = "PET_"
    elif (
        read_number(environ, "SLURM_NNODES", 1) > 1
        or read_number(environ, "SLURM_STEP_NUM_TASKS", 1) > 1
    ):
        return _slurm_nodes(environ)
    else:
        return Nodes(1, 0, "127.0.0.1", 0, "no cluster variables")
    count = read_number(environ, f"{prefix}NNODES", 1)
    if count == 1:
        return Nodes(1, 0, "127.0.0.1", 0, source)
    endpoint = ""
    if prefix:
        endpoint = environ.get("PET_RDZV_ENDPOINT", "")
    host, port = _split_endpoint(endpoint)
    addr = (environ.get(f"{prefix}MASTER_ADDR") or environ.get("MASTER_ADDR") or host).strip("[]")
    several = f"{prefix}NNODES={count}, but"
    if not addr:
        host_name = "set it, on every node, to the host name of the node with NODE_RANK=0"
        raise UserError(f"{several} MASTER_ADDR is not set: {host_name}")
    if not environ.get(f"{prefix}NODE_RANK"):
        raise UserError(f"{several} {prefix}NODE_RANK is not set: 0 to {count - 1}")
    rank = read_number(environ, f"{prefix}NODE_RANK", 0)
    if rank >= count:
        raise UserError(
            f"{prefix}NODE_RANK={rank} must be from 0 to {count - 1}, since {prefix}NNODES={count}"
        )
    named = "the port of PET_RDZV_ENDPOINT"
    default_port = read_number(environ, "MASTER_PORT", DEFAULT_PORT, *PORTS)
    default_port = read_number({named: port}, named, default_port, *PORTS)
    return Nodes(
        count,
        rank,
        addr,
        read_number(environ, f"{prefix}MASTER_PORT", default_port, *PORTS),
        source,
    )


def _split_endpoint(endpoint: str) -> tuple[str, str]:
    """Return host and port of HOST:PORT; the port may be missing, and an IPv6 address with a port
    is in brackets.
    """
    if endpoint.startswith("["):
        host, _, port = endpoint[1:].partition("]")
        return host, port.removeprefix(":")
    if endpoint.count(":") == 1:
        host, _, port = endpoint.partition(":")
        return host, port
    return endpoint, ""


def _slurm_nodes(environ: Mapping[str, str]) -> Nodes:
    count = read_number(environ, "SLURM_NNODES", 1)
    tasks = read_number(environ, "SLURM_STEP_NUM_TASKS", count)
    if tasks > count:
        remedy = "use --ntasks-per-node=1, or run `python -m titanlite.train` for one task per GPU"
        raise UserError(f"srun started {tasks} launchers on {counted(count, 'node')}: {remedy}")
    return Nodes(count, read_number(environ, "SLURM_NODEID", 0), *slurm_master(environ), "SLURM_*")


def count_processes(environ: Mapping[str, str], device: str, gpus: int) -> int:
    """Return the number of workers on this node: NGPU, else one per GPU, else two on the CPU."""
    if environ.get("NGPU"):
        return read_number(environ, "NGPU", 1, least=1)
    if environ.get("PET_NPROC_PER_NODE", "").isdigit():
        return read_number(environ, "PET_NPROC_PER_NODE", 1, least=1)
    return gpus if device == "cuda" else min(2, cores())


def count_gpus(environ: Mapping[str, str]) -> int:
    """Return the number of NVIDIA GPUs that this process may use, counted without torch."""
    if "CUDA_VISIBLE_DEVICES" in environ:
        listed = [part.strip() for part in environ["CUDA_VISIBLE_DEVICES"].split(",")]
        return len([part for part in listed if part and part != "-1"])
    device_files = []
    for path in Path("/dev").glob("nvidia*"):
        if path.name[6:].isdigit():
            device_files.append(path)
    if device_files:
        return len(device_files)
    # WSL has no device files.
    return len([uuid for uuid in _query_gpus("uuid") if uuid.startswith("GPU-")])


def gpu_bytes() -> int | None:
    """Return the memory of the smallest GPU; None if unknown."""
    sizes = []
    for mebibytes in _query_gpus("memory.total"):
        if mebibytes.isdigit():
            sizes.append(int(mebibytes) << 20)
    return min(sizes, default=None)


def gpu_capability() -> tuple[int, int] | None:
    """Return the compute capability of the oldest GPU; None if unknown."""
    versions = []
    for text in _query_gpus("compute_cap"):
        if re.fullmatch(r"\d+\.\d+", text):
            versions.append(text.split("."))
    return min(((int(major), int(minor)) for major, minor in versions), default=None)


def gpu_name() -> str:
    """Return the driver's name of the first GPU, or an empty string."""
    return next(iter(_query_gpus("name")), "")


def _query_gpus(field: str) -> list[str]:
    """Return a field of each GPU from the driver; asking torch would allocate GPU memory."""
    try:
        return ask_driver(f"--query-gpu={field}", "--format=csv,noheader,nounits").splitlines()
    except UserError as error:
        say(f"titanlite: {error}: {field} of the GPUs is unknown")
        return []


def find_device(choice: str, environ: Mapping[str, str]) -> tuple[str, int]:
    """Return the kind of device that job.device stands for, and the number of workers on this
    node.
    """
    gpus = 0 if choice == "cpu" else count_gpus(environ)
    if choice == "cuda" and not gpus:
        hidden = environ.get("CUDA_VISIBLE_DEVICES")
        why = "there is no /dev/nvidia*"
        if hidden is not None:
            why = f'CUDA_VISIBLE_DEVICES="{hidden}"'
        raise UserError(
            f'job.device = "cuda", but this node has no GPU ({why}); on the CPU: --job.device cpu'
        )
    device = "cpu"
    if choice == "cuda" or (choice == "auto" and gpus):
        device = "cuda"
    processes = count_processes(environ, device, gpus)
    if device == "cuda" and processes > gpus:
        raise UserError(
            f"NGPU={processes}, but this node has {gpus} GPUs; on the CPU: --job.device cpu"
        )
    return device, max(1, processes)


def worker_environment(nodes: Nodes, processes: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are added for workers: the launcher's process id, and defaults for
    unset ones.
    """
    defaults = {
        THREADS: threads_each(processes),
        "PYTHONUNBUFFERED": "1",
        # the system frees what a stopped loader leaves behind
        "PYTHONWARNINGS": "ignore:resource_tracker:UserWarning",
    }
    if nodes.count == 1:  # a laptop's host name need not resolve
        defaults["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    added = {LAUNCHED: str(os.getpid())}
    for name, value in defaults.items():
        if name not in environ:
            added[name] = value
    return added


THREADS = "OMP_NUM_THREADS"
ASK_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Makes torch count GPUs without starting the driver, which does not survive a fork."""
ONLY_IMPORTS = {ASK_NVML: "1", "OPENBLAS_NUM_THREADS": "1"}
"""Variables for a process that imports torch only to be forked; OpenBLAS would start threads."""


def threads_each(processes: int) -> str:
    """Return how many threads a worker computes with by default."""
    return str(max(1, cores() // processes))


def prepare_imports(processes: int, environ: MutableMapping[str, str]) -> set[str]:
    """Set the variables that torch reads when imported, in a process from which workers are forked;
    return the names of those that are for these imports only.
    """
    set_defaults(environ)
    environ.setdefault(THREADS, threads_each(processes))
    own = {name for name in ONLY_IMPORTS if name not in environ}
    environ.update((name, ONLY_IMPORTS[name]) for name in own)
    return own


def check_gpus(device: str) -> None:
    """Raise if torch can't use this node's GPUs."""
    import torch

    if device == "cuda" and not in_a_fork(has_usable_gpu):  # the driver must not start here
        raise UserError(
            f"this node has GPUs, but torch {torch.__version__} can't use them: "
            "torch.cuda.is_available() is false; on the CPU: --job.device cpu"
        )


def has_usable_gpu() -> bool:
    """Return whether torch can use a GPU; starts the driver in this process."""
    import torch

    os.environ.pop(ASK_NVML, None)
    return torch.cuda.is_available()


def describe_nodes(nodes: Nodes, device: str, processes: int) -> str:
    """Return the number of processes to start, and the variables that set it."""
    noun = "process" if processes == 1 else "processes"
    place = "GPUs" if device == "cuda" else "CPU"
    reason = "NGPU sets another number"
    if os.environ.get("NGPU"):
        reason = "from NGPU"
    text = f"{processes} {noun} on the {place} ({reason})"
    if nodes.count > 1:
        spare = f", {nodes.spare} spare" if nodes.spare else ""
        text += f"; NODE_RANK {nodes.rank} ({nodes.count} nodes{spare}; from {nodes.source})"
    return text
