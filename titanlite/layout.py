"""How the ranks are split, and the batch arithmetic that follows: numbers only, checked and used elsewhere."""

from dataclasses import dataclass
from math import prod

DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")  # outermost first
EXPERT_DIMENSIONS = ("pp", "dp_replicate", "efsdp", "ep")  # of the same ranks in the same order


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


@dataclass(frozen=True)
class Layout:
    """Degrees of the mesh. `ep` is not a dimension of it: experts are a second view of dp_shard x cp x tp."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    experts: bool = False
    """The model has experts."""

    @property
    def degrees(self) -> tuple[int, ...]:
        return (self.pp, self.dp_replicate, self.dp_shard, self.cp, self.tp)

    @property
    def world(self) -> int:
        return prod(self.degrees)

    @property
    def batch(self) -> int:
        """Return how many groups of ranks read different data."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        """Return how many ranks parameters are sharded over."""
        return self.dp_shard * self.cp

    @property
    def efsdp(self) -> int:
        """Return how many ranks have the same experts, and shard their weights."""
        return self.dp_shard * self.cp * self.tp // self.ep

    @property
    def expert_degrees(self) -> tuple[int, ...]:
        return (self.pp, self.dp_replicate, self.efsdp, self.ep)

    @property
    def experts_apart(self) -> bool:
        """Return whether experts are sharded over other ranks than what is around them."""
        return self.experts and self.ep * self.tp > 1

    @property
    def most_sharded(self) -> int:
        """Return over how many ranks those parameters are sharded that are over the most."""
        return max(self.fsdp, self.efsdp * self.experts_apart)

    @property
    def splits(self) -> int:
        """Return how many ranks the model's matrices are split over, by all dimensions together."""
        return self.pp * self.fsdp * self.tp

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return a rank's coordinate on each dimension of the mesh."""
        coordinates: dict[str, int] = {}
        for name, degree in zip(reversed(DIMENSIONS), reversed(self.degrees), strict=True):
            rank, coordinates[name] = divmod(rank, degree)
        return {name: coordinates[name] for name in DIMENSIONS}

    def batch_coordinate(self, rank: int) -> int:
        """Return which of the `batch` data streams a rank reads."""
        return rank // (self.cp * self.tp) % self.batch

    def __str__(self) -> str:
        used = [f"{name} {degree}" for name, degree in zip(DIMENSIONS, self.degrees, strict=True) if degree > 1]
        return (" x ".join(used) or "one rank") + f", experts over {self.ep}" * (self.ep > 1)


@dataclass(frozen=True)
class Batch:
    """Samples in a step."""

    local: int
    data_parallel: int
    accumulation: int

    @property
    def total(self) -> int:
        return self.local * self.data_parallel * self.accumulation
