"""What a rehearsal of one training step records: its operations in order, the bytes alive, the
collectives. No torch.

Bytes, FLOPs and collectives are those of one rank.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from titanlite.layout import DIMENSIONS, EXPERT_DIMENSIONS, Layout

KINDS = tuple(
    "parameters gathered gradients activations logits optimizer buffers communication host".split()
)
"""The uses of bytes. "buffers" are the model's; "communication" is read or written by a
collective; "host" is offloaded memory, in no GPU's memory.
"""
DISK = "disk"
"""The static bytes in training.offload_folder, and their resource."""
ON_HOST = " on the host"
"""Ends a phase that the host computes."""


def views(layout: Layout) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
    """Return the names and degrees of a layout's dimensions, then those that experts have."""
    experts = [(EXPERT_DIMENSIONS, layout.expert_degrees)] * (layout.ep > 1)
    return [(DIMENSIONS, layout.degrees), *experts]


@dataclass(frozen=True)
class Collective:
    kind: str
    """ "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "broadcast" or "send-receive",
    which is recorded where it is sent; "to GPU" and "from GPU" of offloaded tensors.
    """
    dimension: str
    """As in Layout ("dp_shard"), "ep" and "efsdp" of experts; joined with " x " where a group spans
    several, "world" for all ranks; "host" of offloaded tensors.
    """
    ranks: int
    dtype: str
    bytes: int
    """Of the whole tensor: the gathered one, the one before it is scattered, the one sent."""

    def __str__(self) -> str:
        size = f"{self.bytes:,} bytes"
        return f"{self.kind} on {self.dimension} ({self.ranks} ranks, {self.dtype}, {size})"


class Event(NamedTuple):
    """A part of a pipeline rank's step."""

    kind: str
    """ "F", "B", "I" or "W" of an action, "gather" before it where the schedule waits for its
    parameters, "reduce" of a stage's gradients, "receive F" and "receive B" of what an action needs
    of another rank, "send F" and "send B" of what it gives it, and "rest" of a step after all.
    """
    stage: int = -1
    micro_batch: int = -1


@dataclass(frozen=True)
class Operation:
    phase: str
    """ "embedding", "forward 3", "head", "backward head", "backward 3", "gradient norm",
    "optimizer", …; of later pipeline stages "forward input" and "backward gradient" are first,
    "forward output" and "backward input" last, and "backward weights" is a backward pass's second
    half; "forward send" and "backward receive" are between actions.
    """
    live: int
    """The most bytes alive until this operation is done, all kinds together."""
    flops: int = 0
    """By the table of torch.utils.flop_counter."""
    dtype: str = ""
    """Of its FLOPs."""
    moved: int = 0
    """Bytes of its inputs and outputs, the least traffic of device memory; 0 for views and
    collectives.
    """
    collective: Collective | None = None
    awaits: bool = False
    """First consumer of the oldest outstanding all-gather of parameters."""
    is_fsdp: bool = False
    """FSDP2 gathers or reduces: on lanes of their own, whatever their dimension."""
    by_kind: tuple[int, ...] = ()
    """`live` as a sum over KINDS, in their order, and the most on the host until this operation is
    done; empty where kinds were not separated.
    """
    event: Event | None = None
    """Of a pipeline's rank: the last one that began."""
    name: str = ""
    """Of the dispatched operation, such as "mm"; empty for mere changes of the bytes alive."""


@dataclass(frozen=True)
class Recording:
    """One step of one rank, in order."""

    operations: Sequence[Operation]
    static: Mapping[str, int]
    """Bytes by kind that a rank keeps: parameters, gradients, optimizer, buffers."""

    @property
    def at_peak(self) -> dict[str, int]:
        """Return the bytes alive at the peak, by kind; on the host, at its own."""
        fullest = max(self.operations, key=lambda operation: operation.live)
        on_host = (one.by_kind[-1] for one in self.operations if one.by_kind)
        host = max(on_host, default=0)
        return {**dict(zip(KINDS, fullest.by_kind, strict=False)), "host": host}

    @property
    def peak(self) -> int:
        return max(operation.live for operation in self.operations)

    @property
    def moment(self) -> str:
        """Return the phase of the peak."""
        return max(self.operations, key=lambda operation: operation.live).phase

    def collectives(self) -> Counter[Collective]:
        return Counter(
            operation.collective for operation in self.operations if operation.collective
        )
