"""The GPU, node and network that a plan is for, from hardware.toml and the files laid over it. No torch."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from titanlite.config.hardware_table import hardware_table
from titanlite.errors import UserError, nearest

GIB = 1 << 30


@dataclass(frozen=True)
class GPU:
    words: str
    """Of its name in torch."""
    memory_gib: float
    memory: float
    """Bandwidth in GB/s."""
    node: str
    peaks: Mapping[str, float]
    """Dense TFLOP/s by type."""


@dataclass(frozen=True)
class Node:
    gpus: int
    link: float
    """GB/s that a GPU sends to the others of its node."""
    nics: int
    network: str
    source: str


@dataclass(frozen=True)
class Efficiency:
    share: float
    """Of the peak."""
    source: str


@dataclass(frozen=True)
class Reserve:
    gib: float
    """Of a GPU's memory, for what no rehearsal counts."""
    source: str


_Entry = TypeVar("_Entry", GPU, Node, Efficiency, Reserve)


@dataclass(frozen=True)
class Hardware:
    name: str
    gpu: GPU
    node: Node
    nic: float
    """GB/s of a NIC."""
    reserve: Reserve
    efficiencies: Mapping[str, Efficiency]
    """By type ("bfloat16", "bfloat16 compiled"), "link" and "network"."""

    @property
    def usable_bytes(self) -> int:
        return int((self.gpu.memory_gib - self.reserve.gib) * GIB)

    @property
    def memory_rate(self) -> float:
        """Return bytes per second of the GPU's memory."""
        return self.gpu.memory * 1e9

    @property
    def link_rate(self) -> float:
        """Return the bytes per second that a GPU sends to the others of its node."""
        return self.node.link * 1e9

    @property
    def network_rate(self) -> float:
        """Return bytes per second of the NICs of a node, for each of its GPUs."""
        return self.nic * 1e9 * self.node.nics / self.node.gpus

    def peak(self, dtype: str) -> float:
        """Return the peak of a type in FLOP/s."""
        key = _type(dtype)
        if key not in self.gpu.peaks:
            known = ", ".join(self.gpu.peaks)
            raise UserError(f"--gpu {self.name}: its peak in {key} is not known, only in {known}; --hardware adds it")
        return self.gpu.peaks[key] * 1e12

    def efficiency_of(self, what: str, compiled: bool) -> str:
        """Return which efficiency counts for a type of FLOPs, or for memory, link or network."""
        key = _type(what)
        return f"{key} compiled" if compiled and f"{key} compiled" in self.efficiencies else key

    def assumptions(self, efficiencies: Iterable[str]) -> list[str]:
        """Return what of the speed is not known but assumed: the node, and which of these efficiencies."""
        links = f"{self.node.link:g} GB/s between GPUs, {self.node.nics} NICs of {self.nic:g} GB/s"
        sources = {f"node {self.gpu.node}: {links}": self.node.source}
        for key in sorted(efficiencies):
            sources[f"efficiency of {key}: {self.efficiencies[key].share:.0%}"] = self.efficiencies[key].source
        return [f"{what} ({source})" for what, source in sources.items() if "assumed" in source]


def _type(dtype: str) -> str:
    return "float8" if dtype.startswith("float8") else dtype


def load_hardware(gpu: str, files: Sequence[Path] = ()) -> Hardware:
    """Return the hardware around a GPU of hardware.toml, or of the files, which add to it or override it."""
    table = hardware_table(files)
    found = _entry(GPU, table, "gpu", gpu, "--gpu")
    node = _entry(Node, table, "node", found.node, f"gpu.{gpu}.node")
    nic = _named(table, "network", node.network, f"node.{found.node}.network")
    if not _fits(nic, float):
        raise UserError(f"hardware table, network.{node.network}: {nic!r} is not a number of GB/s above 0")
    shares = table["efficiency"]["default"] | table["efficiency"].get(gpu, {})
    efficiencies = {of: _entry(Efficiency, {"efficiency": shares}, "efficiency", of) for of in shares}
    reserve = _entry(Reserve, {"table": table}, "table", "reserve")
    return Hardware(gpu, found, node, nic, reserve, efficiencies)


def recognize(name: str, memory: int | None, files: Sequence[Path] = ()) -> str:
    """Return the GPU of the table for a driver's name and bytes of memory, or an empty string."""
    words, gpus = set(name.replace("-", " ").split()), hardware_table(files)["gpu"]
    alike = [key for key, gpu in gpus.items() if words.issuperset(gpu["words"].split())]
    same = [key for key in alike if gpus[key]["words"] == gpus[alike[0]]["words"]]  # what has more words stands first
    return min(same, key=lambda key: abs(gpus[key]["memory_gib"] * GIB - (memory or 0)), default="")


def _named(table: Mapping[str, Any], kind: str, name: str, asked: str) -> Any:
    if name not in table[kind]:
        close = " or ".join(key for key in table[kind] if key.startswith(name)) or nearest(name, table[kind])
        known = f"did you mean {close}? " * bool(close) + f"known: {', '.join(table[kind])}"
        raise UserError(f"{asked} {name}: unknown {kind}; {known}; --hardware adds others")
    return table[kind][name]


def _entry(kind: type[_Entry], table: Mapping[str, Any], section: str, name: str, asked: str = "") -> _Entry:
    """Return an entry of the table; one of a user's file may lack a field or misspell it."""
    given, types = _named(table, section, name, asked), kind.__annotations__
    if not isinstance(given, dict):
        raise UserError(f"hardware table, {section}.{name}: {given!r} is not a table of {', '.join(types)}")
    wrong = [f"{key} is missing" for key in types if key not in given]
    wrong += [f"{key} is unknown; it has {', '.join(types)}" for key in given if key not in types]
    bad = [key for key in types if key in given and not _fits(given[key], types[key])]
    wrong += [f"{key} = {given[key]!r} is not {_LEGAL.get(types[key], 'a table of numbers above 0')}" for key in bad]
    if kind is Efficiency and not wrong and given["share"] > 1:
        wrong = [f"share = {given['share']:g} is above 1"]
    if wrong:
        raise UserError(f"hardware table, {section}.{name}: {'; '.join(wrong)}")
    return kind(**given)


_LEGAL: dict[Any, str] = {str: "a text", int: "a number above 0", float: "a number above 0"}


def _fits(value: Any, kind: Any) -> bool:
    """Return whether a value is a text, a number above 0, or a table of such numbers, as asked."""
    if kind is str:
        return isinstance(value, str)
    if kind in (int, float):
        return isinstance(value, (int, float)) and value > 0
    return isinstance(value, dict) and all(_fits(number, float) for number in value.values())
