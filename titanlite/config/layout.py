"""Mesh degrees and batch arithmetic as plain values.

config/rules checks them, and parallel/mesh builds from them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")  # outermost first
EXPERT_DIMENSIONS = ("pp", "dp_replicate", "efsdp", "ep")  # of the same ranks in the same order


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


@dataclass(frozen=True)
class Layout:
    """Degrees of the mesh.

    `ep` is not one of its dimensions: experts use a second view of dp_shard x cp x tp.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    experts: bool = False
    """Whether the model has experts."""

    @property
    def degrees(self) -> tuple[int, ...]:
        return (self.pp, self.dp_replicate, self.dp_shard, self.cp, self.tp)

    @property
    def world(self) -> int:
        return prod(self.degrees)

    @property
    def data_parallel(self) -> int:
        """The number of data-parallel groups, which read different data."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        """The number of ranks that parameters are sharded over."""
        return self.dp_shard * self.cp

    @property
    def expert_fsdp(self) -> int:
        """The number of ranks that have the same experts and shard their weights."""
        return self.dp_shard * self.cp * self.tp // self.ep

    @property
    def expert_degrees(self) -> tuple[int, ...]:
        return (self.pp, self.dp_replicate, self.expert_fsdp, self.ep)

    @property
    def experts_on_own_mesh(self) -> bool:
        """Whether experts are sharded over other ranks than the layers around them."""
        return self.experts and self.ep * self.tp > 1

    @property
    def sums_experts_apart(self) -> bool:
        """Return whether experts on a mesh of their own are sharded or have replicas."""
        return self.experts_on_own_mesh and self.expert_fsdp * self.dp_replicate > 1

    @property
    def max_shard_degree(self) -> int:
        """The largest sharding degree of any parameter."""
        if self.experts_on_own_mesh:
            return max(self.fsdp, self.expert_fsdp)
        return self.fsdp

    @property
    def model_shards(self) -> int:
        """The number of ranks that a matrix is split over, all dimensions together."""
        return self.pp * self.fsdp * self.tp

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return a rank's coordinate on each dimension of the mesh."""
        coordinates: dict[str, int] = {}
        for name, degree in zip(reversed(DIMENSIONS), reversed(self.degrees), strict=True):
            rank, coordinates[name] = divmod(rank, degree)
        return {name: coordinates[name] for name in DIMENSIONS}

    def place(self, rank: int, dimensions: Sequence[str]) -> tuple[int, ...]:
        """Return a rank's coordinate on some dimensions of any view of the mesh."""
        of = self.coordinates(rank)
        of["dp_shard_cp"] = of["dp_shard"] * self.cp + of["cp"]
        of["efsdp"], of["ep"] = divmod(of["dp_shard_cp"] * self.tp + of["tp"], self.ep)
        return tuple(of[name] for name in dimensions)

    def batch_coordinate(self, rank: int) -> int:
        """Return which of the `data_parallel` data streams a rank reads."""
        return rank // (self.cp * self.tp) % self.data_parallel

    def __str__(self) -> str:
        named = zip(DIMENSIONS, self.degrees, strict=True)
        used = [f"{name} {degree}" for name, degree in named if degree > 1]
        text = " x ".join(used) or "one rank"
        if self.ep > 1:
            text += f", experts over {self.ep}"
        return text


@dataclass(frozen=True)
class Batch:
    """Samples in a step."""

    local: int
    data_parallel: int
    accumulation: int

    @property
    def total(self) -> int:
        return self.local * self.data_parallel * self.accumulation
