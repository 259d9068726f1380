"""What a rehearsal of one training step records: its operations in order, with the bytes alive and
the collectives. Imports no torch.

Bytes, FLOPs and collectives are those of one rank.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from titanlite.config.layout import DIMENSIONS, EXPERT_DIMENSIONS, Layout

KINDS = tuple(
    "parameters gathered gradients activations logits optimizer buffers communication host".split()
)
"""The uses of memory. "buffers" are the model's; "communication" is read or written by a
collective; "host" is offloaded, so on no GPU.
"""
DISK = "disk"
"""Names the static bytes in optimizer.state_folder, and the disk as a resource."""
ON_HOST = " on the host"
"""Ends the name of a phase that the host computes."""


def views(layout: Layout) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
    """Return the names and degrees of a layout's dimensions, then those of its experts' mesh."""
    found: list[tuple[tuple[str, ...], tuple[int, ...]]] = [(DIMENSIONS, layout.degrees)]
    if layout.ep > 1:
        found.append((EXPERT_DIMENSIONS, layout.expert_degrees))
    return found


@dataclass(frozen=True)
class Collective:
    kind: str
    """ "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "broadcast" or "send-receive",
    which is recorded by the sender; "to GPU" and "from GPU" for offloaded tensors.
    """
    dimension: str
    """As in Layout ("dp_shard"), or "ep" and "efsdp" for experts; joined with " x " if a group
    spans several, "world" for all ranks; "host" for offloaded tensors.
    """
    ranks: int
    dtype: str
    bytes: int
    """Bytes of the whole tensor: after a gather, before a scatter, or as sent."""

    def __str__(self) -> str:
        size = f"{self.bytes:,} bytes"
        return f"{self.kind} on {self.dimension} ({self.ranks} ranks, {self.dtype}, {size})"


class Event(NamedTuple):
    """A part of a pipeline rank's step."""

    kind: str
    """ "F", "B", "I" or "W" for an action; "gather" before it, if the schedule waits for its
    parameters; "reduce" for a stage's gradients; "receive F" and "receive B" for an action's inputs
    from another rank, "send F" and "send B" for its outputs; and "rest" after the schedule.
    """
    stage: int = -1
    micro_batch: int = -1


@dataclass(frozen=True)
class Operation:
    phase: str
    """ "embedding", "forward 3", "head", "backward head", "backward 3", "gradient norm",
    "optimizer", …; in later pipeline stages "forward input" and "backward gradient" come first,
    "forward output" and "backward input" last, and "backward weights" is the second half of a
    backward pass; "forward send" and "backward receive" lie between actions.
    """
    live: int
    """The most bytes alive, of all kinds, until this operation is done."""
    flops: int = 0
    """Counted by the table of torch.utils.flop_counter."""
    dtype: str = ""
    """The type of its FLOPs."""
    moved: int = 0
    """Bytes of its inputs and outputs, the least traffic of device memory; 0 for views and
    collectives.
    """
    collective: Collective | None = None
    by_kind: tuple[int, ...] = ()
    """`live` divided into KINDS, in their order, then the most bytes on the host until this
    operation is done; empty if kinds were not separated.
    """
    event: Event | None = None
    """The last event that began on a pipeline's rank."""


@dataclass(frozen=True)
class Recording:
    """One step of one rank, in order."""

    operations: Sequence[Operation]
    static: Mapping[str, int]
    """Bytes by kind that a rank keeps: parameters, gradients, optimizer, buffers."""

    @property
    def at_peak(self) -> dict[str, int]:
        """Return the bytes alive at the peak, by kind; the host's at the host's own peak."""
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
        return Counter(filter(None, (operation.collective for operation in self.operations)))


class Moment(NamedTuple):
    """The fullest moment of a part of a step."""

    phase: str
    live: int
    by_kind: tuple[int, ...]


@dataclass(frozen=True)
class Totals:
    """The totals of one step of one rank."""

    moments: Mapping[Any, Moment]
    """The fullest moment of each part of the step, in order."""
    static: Mapping[str, int]
    flops: Counter[str]
    """FLOPs by type."""
    moved: Counter[str]
    """Traffic in bytes that no compiler can fuse away (matrix products, the update, the host's
    work), by memory: "" is the GPU's, ON_HOST the host's."""
    number: Counter[Collective]
    """How often each collective runs; those that differ only in bytes share a key with 0 bytes."""
    sent: Counter[Collective]
    """Their bytes together, by the same keys."""

    @property
    def at_peak(self) -> dict[str, int]:
        """Return the bytes alive at the peak, by kind; the host's at the host's own peak."""
        on_host = (moment.by_kind[-1] for moment in self.moments.values() if moment.by_kind)
        host = max(on_host, default=0)
        return {**dict(zip(KINDS, self._fullest.by_kind, strict=False)), "host": host}

    @property
    def peak(self) -> int:
        return self._fullest.live

    @property
    def moment(self) -> str:
        """Return the phase of the peak."""
        return self._fullest.phase

    @property
    def _fullest(self) -> Moment:
        return max(self.moments.values(), key=lambda moment: moment.live)

    def extended(self, more: "Totals", steps: int) -> "Totals":
        """Extrapolate the totals linearly, `steps` times the distance from these to `more`, which
        have a period of blocks more.
        """
        moments = {}
        for key, one in self.moments.items():
            other = more.moments[key]
            pairs = zip(one.by_kind, other.by_kind, strict=True)
            by_kind = tuple(few + (many - few) * steps for few, many in pairs)
            moments[key] = Moment(one.phase, one.live + (other.live - one.live) * steps, by_kind)
        static = {}
        for kind, few in self.static.items():
            static[kind] = few + (more.static[kind] - few) * steps
        return Totals(
            moments,
            static,
            _extended(self.flops, more.flops, steps),
            _extended(self.moved, more.moved, steps),
            _extended(self.number, more.number, steps),
            _extended(self.sent, more.sent, steps),
        )


def _extended(few: Counter[Any], more: Counter[Any], steps: int) -> Counter[Any]:
    return Counter({key: few[key] + (more[key] - few[key]) * steps for key in (few | more)})


def add_up(
    recording: Recording, positions: Mapping[int, tuple[Any, int] | None] | None = None
) -> Totals:
    """Return the totals of a step. A block's moments have its position as their key, and are named
    by the number given with the position; a block whose position is None gets none.
    """
    moments = dict[Any, Moment]()
    flops = Counter[str]()
    moved = Counter[str]()
    number = Counter[Any]()
    sent = Counter[Any]()
    for one in recording.operations:
        flops[one.dtype] += one.flops
        is_on_host = one.phase.endswith(ON_HOST)
        if is_on_host:
            moved[ON_HOST] += one.moved
        elif one.flops or one.phase == "optimizer":
            moved[""] += one.moved
        if one.collective:
            kind = replace(one.collective, bytes=0)
            number[kind] += 1
            sent[kind] += one.collective.bytes
        phase, _, block = one.phase.rpartition(" ")
        key = (one.event, one.phase)
        name = one.phase
        if block.isdigit() and positions:
            position = positions[int(block)]
            if position is None:
                continue
            key = (one.event, phase, position[0])
            name = f"{phase} {position[1]}"
        found = Moment(name, one.live, one.by_kind)
        known = moments.setdefault(key, found)
        fuller = known
        if found.live > known.live:
            fuller = found
        if fuller.by_kind:
            host = max(known.by_kind[-1:], found.by_kind[-1:])
            fuller = fuller._replace(by_kind=(*fuller.by_kind[:-1], *host))
        moments[key] = fuller
    return Totals(moments, recording.static, +flops, +moved, number, sent)
