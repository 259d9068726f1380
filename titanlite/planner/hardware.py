"""The GPU, node and network that a plan is for, from hardware.toml and the files that override it.
Imports no torch.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from titanlite.config.hardware_table import GIB, hardware_table
from titanlite.errors import UserError, nearest

PositiveFloat = Annotated[float, Field(gt=0, strict=True)]
PositiveInt = Annotated[int, Field(gt=0, strict=True)]
_EXACT = ConfigDict(extra="forbid")


@dataclass(frozen=True, config=_EXACT)
class GPUHardware:
    words: str
    """Words of the GPU's name in torch."""
    memory_gib: PositiveFloat
    memory: PositiveFloat
    """Bandwidth in GB/s."""
    node: str
    peaks: dict[str, PositiveFloat]
    """Dense TFLOP/s by type."""
    source: str = "from a file"


@dataclass(frozen=True, config=_EXACT)
class Host:
    gib: PositiveFloat = 1024
    """A node's memory."""
    memory: PositiveFloat = 410
    """Bandwidth in GB/s."""
    link: PositiveFloat = 32
    """GB/s between the host and a GPU, in one direction."""
    disk: PositiveFloat = 5
    """GB/s of optimizer.state_folder on a node, reads and writes together."""
    source: str = "assumed: 16 channels of DDR4-3200, PCIe 4.0 x16, one NVMe disk"


@dataclass(frozen=True, config=_EXACT)
class NodeHardware:
    gpus: PositiveInt
    link: PositiveFloat
    """GB/s that a GPU can send to the other GPUs of its node."""
    nics: PositiveInt
    network: str
    source: str
    host: Host = Host()


@dataclass(frozen=True, config=_EXACT)
class Reserve:
    gib: Annotated[float, Field(ge=0, strict=True)]
    """GPU memory reserved for what no rehearsal counts."""
    allocator: PositiveFloat
    """Memory that torch's allocator takes if it has room, as a multiple of a step's peak."""
    allocator_alone: PositiveFloat
    """The same on a rank that gathers nothing."""
    source: str


@dataclass(frozen=True)
class Hardware:
    name: str
    gpu: GPUHardware
    node: NodeHardware
    nic: PositiveFloat
    """GB/s of a NIC."""
    reserve: Reserve

    def fits(self, peak: int, on_host: int) -> bool:
        """Return whether a rank's bytes fit on its GPU, and those of a node's ranks on its host."""
        return peak <= self.usable_bytes and on_host * self.node.gpus <= self.node.host.gib * GIB

    @property
    def usable_bytes(self) -> int:
        return int((self.gpu.memory_gib - self.reserve.gib) * GIB)

    @property
    def memory_rate(self) -> float:
        """Return bytes per second of the GPU's memory."""
        return self.gpu.memory * 1e9

    @property
    def link_rate(self) -> float:
        """Return the bytes per second that a GPU can send to the other GPUs of its node."""
        return self.node.link * 1e9

    @property
    def network_rate(self) -> float:
        """Return bytes per second of the NICs of a node, for each of its GPUs."""
        return self.nic * 1e9 * self.node.nics / self.node.gpus

    @property
    def host_rate(self) -> float:
        """Return bytes per second of the host's memory, for each of its GPUs."""
        return self.node.host.memory * 1e9 / self.node.gpus

    def streaming(self, size: int) -> float:
        """Return the seconds that reading and writing `size` bytes on the disk takes each GPU."""
        return 2 * size * self.node.gpus / (self.node.host.disk * 1e9)

    def peak(self, dtype: str) -> float:
        """Return the peak of a type in FLOP/s."""
        key = _type(dtype)
        if key not in self.gpu.peaks:
            known = ", ".join(self.gpu.peaks)
            raise UserError(
                f"--gpu {self.name}: its peak in {key} is not known, only in {known}; "
                "--hardware adds it"
            )
        return self.gpu.peaks[key] * 1e12

    @property
    def assumptions(self) -> list[str]:
        """Return what is assumed of the node."""
        if "assumed" not in self.node.source:
            return []
        links = f"{self.node.link:g} GB/s between GPUs, {self.node.nics} NICs of {self.nic:g} GB/s"
        return [with_source(f"node {self.gpu.node}: {links}", self.node.source)]


def with_source(what: str, source: str) -> str:
    """Return an assumption with its source, without the word "assumed", which the heading has."""
    source = source.removeprefix("assumed").lstrip(",: ")
    if source:
        return f"{what} ({source})"
    return what


def _type(dtype: str) -> str:
    if dtype.startswith("float8"):
        return "float8"
    return dtype


def load_hardware(gpu: str, files: Sequence[Path] = ()) -> Hardware:
    """Return the hardware around a GPU, from hardware.toml and the files that add to it or
    override it.
    """
    table = hardware_table(files)
    found = _entry(GPUHardware, table, "gpu", gpu, "--gpu")
    node = _entry(NodeHardware, table, "node", found.node, f"gpu.{gpu}.node")
    nic = _entry(PositiveFloat, table, "network", node.network, f"node.{found.node}.network")
    reserve = _entry(Reserve, {"table": table}, "table", "reserve")
    return Hardware(gpu, found, node, nic, reserve)


def _entry(kind: Any, table: Mapping[str, Any], section: str, name: str, asked: str = "") -> Any:
    """Return an entry of the table; raise a UserError if it is missing, or lacks or misspells a
    field, as in a user's file.
    """
    known = table[section]
    if name not in known:
        close = [key for key in known if key.startswith(name)]
        similar = nearest(name, known)
        if similar and not close:
            close = [similar]
        which = f"known: {', '.join(known)};"
        if close:
            which = f"did you mean {' or '.join(close)}?"
        raise UserError(f"{asked} {name}: unknown {section}; {which} --hardware adds others")
    try:
        return TypeAdapter(kind).validate_python(known[name])
    except ValidationError as error:
        faults = []
        for fault in error.errors():
            title = ""
            if fault["loc"]:
                title = f"{'.'.join(map(str, fault['loc']))} = "
            faults.append(f"{title}{fault['input']!r}: {fault['msg']}")
        why = "; ".join(faults)
        raise UserError(f"hardware table, {section}.{name}: {why}") from None
