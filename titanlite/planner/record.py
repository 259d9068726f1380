"""What a rehearsal of one training step records: its operations in order, the bytes alive, the
collectives. No torch.

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
    by_kind: tuple[int, ...] = ()
    """`live` as a sum over KINDS, in their order, and the most on the host until this operation is
    done; empty where kinds were not separated.
    """
    event: Event | None = None
    """Of a pipeline's rank: the last one that began."""


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


class Moment(NamedTuple):
    """The fullest moment of a part of a step."""

    phase: str
    live: int
    by_kind: tuple[int, ...]


@dataclass(frozen=True)
class Totals:
    """One step of one rank, summed up."""

    moments: Mapping[Any, Moment]
    """Of each part of the step, in order."""
    static: Mapping[str, int]
    flops: Counter[str]
    """By type."""
    moved: Counter[str]
    """Bytes that no compiler can fuse away, of the GPU's memory ("") and of the host's: of matrix
    products, of the update, and on the host."""
    number: Counter[Collective]
    """Of the collectives of a kind, whose own bytes are 0 here."""
    sent: Counter[Collective]
    """The bytes of these, together."""

    @property
    def at_peak(self) -> dict[str, int]:
        """Return the bytes alive at the peak, by kind; on the host, at its own."""
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
        """Return the totals that are `steps` times as far from these as `more` are, which have a
        period of blocks more.
        """
        moments = {}
        for key, one in self.moments.items():
            other = more.moments[key]
            pairs = zip(one.by_kind, other.by_kind, strict=True)
            by_kind = tuple(few + (many - few) * steps for few, many in pairs)
            moments[key] = Moment(one.phase, one.live + (other.live - one.live) * steps, by_kind)
        return Totals(
            moments,
            {kind: few + (more.static[kind] - few) * steps for kind, few in self.static.items()},
            *(
                _extended(getattr(self, name), getattr(more, name), steps)
                for name in ("flops", "moved", "number", "sent")
            ),
        )


def _extended(few: Counter[Any], more: Counter[Any], steps: int) -> Counter[Any]:
    return Counter({key: few[key] + (more[key] - few[key]) * steps for key in (few | more)})


def add_up(
    recording: Recording, places: Mapping[int, tuple[Any, int] | None] | None = None
) -> Totals:
    """Return the totals of a step; the moments of a block are found by its place, and named by the
    number beside that. A block whose place is None has none.
    """
    moments = dict[Any, Moment]()
    flops, moved, number, sent = Counter[str](), Counter[str](), Counter[Any](), Counter[Any]()
    for one in recording.operations:
        flops[one.dtype] += one.flops
        is_on_host = one.phase.endswith(ON_HOST)
        if one.flops or one.phase == "optimizer" or is_on_host:
            moved[ON_HOST if is_on_host else ""] += one.moved
        if one.collective:
            kind = replace(one.collective, bytes=0)
            number[kind] += 1
            sent[kind] += one.collective.bytes
        phase, _, block = one.phase.rpartition(" ")
        key, name = (one.event, one.phase), one.phase
        if block.isdigit() and places:
            place = places[int(block)]
            if place is None:
                continue
            key, name = (one.event, phase, place[0]), f"{phase} {place[1]}"
        found = Moment(name, one.live, one.by_kind)
        known = moments.setdefault(key, found)
        fuller = found if found.live > known.live else known
        if fuller.by_kind:
            host = max(known.by_kind[-1:], found.by_kind[-1:])
            fuller = fuller._replace(by_kind=(*fuller.by_kind[:-1], *host))
        moments[key] = fuller
    return Totals(moments, recording.static, +flops, +moved, number, sent)
