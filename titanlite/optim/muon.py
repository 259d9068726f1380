"""Muon: orthogonalize the momentum of a hidden matrix before adding it; AdamW for the rest.

The algorithm is torch.optim.Muon's, in which each operation on a sharded matrix would communicate.
Here one rank owns each matrix: it gathers the matrix once, orthogonalizes it, and sends each rank
its part of the result. That takes two all-to-alls per batch of matrices, on any mesh. A batch has a
matrix for every rank, if there are enough. A weight of experts is a stack of matrices, one for each
expert.
"""

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Placement

from titanlite.config.schema import JobConfig
from titanlite.optim.bf16_state import chunk_by_numel
from titanlite.optim.build import TrainedParam, adam_options, groups
from titanlite.parallel.collectives import send_rows
from titanlite.parallel.dtensor import local_part
from titanlite.parallel.mesh import Mesh
from titanlite.registry import Box
from titanlite.runtime import torch_private

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic that maps the singular values: steep at 0, and near 1 after five
iterations.
"""
ITERATIONS = 5
EPS = 1e-7


def muon(
    trained: Sequence[TrainedParam], config: JobConfig, mesh: Mesh | None = None
) -> torch.optim.Optimizer:
    """Build Muon for the hidden matrices, with AdamW for the rest.

    Muon computes in the dtype of the forward pass.
    """
    settings = config.optimizer
    matrices = [item for item in trained if item.is_hidden_matrix]
    rest = [item for item in trained if not item.is_hidden_matrix]
    both = groups(matrices, settings, matrices=True) + groups(rest, settings, matrices=False)
    # An empty group has no parameter names, and torch requires names in all groups or in none.
    parameters = [group for group in both if group["params"]] or both[:1]
    dtype = getattr(torch, config.training.mixed_precision_param)
    return Muon(parameters, dtype, mesh, **adam_options(settings))


def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
    """Approximate U Vᵀ of the SVD U S Vᵀ by Newton-Schulz iterations in the matrix's own dtype."""
    a, b, c = COEFFICIENTS
    is_tall = matrix.size(0) > matrix.size(1)
    wide = matrix
    if is_tall:
        wide = matrix.T
    wide = wide / wide.norm().clamp(min=EPS)
    for _ in range(ITERATIONS):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    if is_tall:
        return wide.T
    return wide


@dataclass(frozen=True)
class Transfer:
    """A region of a matrix that one rank sends to another, or to itself."""

    matrix: int
    source: int
    target: int
    box: Box


@dataclass(frozen=True)
class Spread:
    """A matrix, or matrix `number` of a stack, spread over the ranks of a group."""

    weight: torch.Tensor
    number: int
    holders: Mapping[tuple[int, ...], Sequence[int]]
    """The ranks that hold each shard, by its coordinate in the mesh of the weight."""
    own: tuple[int, ...]
    """The coordinate of this rank's shard."""

    def box(self, coordinate: tuple[int, ...]) -> Box:
        """Return the region of a shard."""
        size = self.weight.shape
        start = (0,) * self.weight.dim()
        if isinstance(self.weight, DTensor):
            size, start = torch_private.shard_at(self.weight, coordinate)
        box = tuple(slice(first, first + n) for first, n in zip(start, size, strict=True))
        if len(box) == 2 or box[0].start <= self.number < box[0].stop:
            return box[-2:]
        return (slice(0, 0), slice(0, 0))


class Route:
    """One all-to-all: the transfers from this rank, by target, and to this rank, by source."""

    def __init__(self, transfers: Sequence[Transfer], rank: int, ranks: int) -> None:
        self.send = sorted((t for t in transfers if t.source == rank), key=lambda t: t.target)
        self.recv = sorted((t for t in transfers if t.target == rank), key=lambda t: t.source)
        self.send_sizes = [0] * ranks
        self.recv_sizes = [0] * ranks
        for transfer in self.send:
            self.send_sizes[transfer.target] += _numel(transfer.box)
        for transfer in self.recv:
            self.recv_sizes[transfer.source] += _numel(transfer.box)


@dataclass(frozen=True)
class RankPart:
    """This rank's part in a batch of numbered matrices."""

    held: tuple[int, ...]
    """Matrices that this rank has a part of."""
    owned: Mapping[int, torch.Size]
    """Matrices that this rank orthogonalizes."""
    gather: Route
    scatter: Route


class Muon(torch.optim.AdamW):
    """AdamW for all groups but those with `matrices`."""

    def __init__(
        self,
        parameters: list[dict[str, Any]],
        dtype: torch.dtype,
        mesh: Mesh | None = None,
        **adamw: Any,
    ) -> None:
        super().__init__(parameters, **adamw)
        self._dtype = dtype
        self._mesh = mesh
        self._rank = 0
        self._ranks = 1
        if mesh:
            self._rank = dist.get_rank(mesh.stage)
            self._ranks = dist.get_world_size(mesh.stage)
        self._plans: dict[tuple[str, ...], RankPart] = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Not AdamW's own, which expects a `step` in every parameter's state.
        torch.optim.Optimizer.__setstate__(self, state)

    def _weights(self) -> Iterator[tuple[str, torch.Tensor, dict[str, Any]]]:
        """Yield each matrix, or stack, with its name and its group."""
        for group in self.param_groups:
            if group["matrices"]:
                # Without names: a stage with nothing to train, or the probe of checkpoint/state.py.
                names = group.get("param_names", [""] * len(group["params"]))
                for name, weight in zip(names, group["params"], strict=True):
                    yield name, weight, group

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        all_groups = self.param_groups
        try:
            self.param_groups = [group for group in all_groups if not group["matrices"]]
            super().step()
        finally:
            self.param_groups = all_groups
        weights = [item for item in self._weights() if item[1].grad is not None]
        for run in chunk_by_numel([weight for _, weight, _ in weights], min_count=self._ranks):
            self._step_together(weights[run])

    def _step_together(self, weights: list[tuple[str, torch.Tensor, dict[str, Any]]]) -> None:
        updates = [self._momentum(weight) for _, weight, _ in weights]
        self._orthogonalize({name: weight for name, weight, _ in weights}, updates)
        for (_, weight, group), update in zip(weights, updates, strict=True):
            local = local_part(weight)
            lr = group["lr"]
            local.mul_(1 - lr * group["weight_decay"])
            # Scaled to the root mean square of a usual AdamW step: one learning rate fits both.
            local.add_(update, alpha=-lr * 0.2 * max(weight.shape[-2:]) ** 0.5)

    def _momentum(self, weight: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the gradient with Nesterov momentum, in new memory."""
        state = self.state[weight]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(weight, requires_grad=False)
        assert weight.grad is not None
        gradient = local_part(weight.grad)
        running = local_part(state["momentum_buffer"])
        running.lerp_(gradient, 1 - MOMENTUM)
        return gradient.lerp(running, MOMENTUM).to(self._dtype)

    def _orthogonalize(self, weights: dict[str, torch.Tensor], parts: list[torch.Tensor]) -> None:
        """Replace this rank's parts of weights by those of the orthogonalized matrices."""
        held: list[torch.Tensor] = []
        for part in parts:
            if part.dim() == 3 and part.numel():
                held.extend(part)
            elif part.numel():
                held.append(part)
        if not self._mesh or self._ranks == 1 or "" in weights:
            for matrix in held:
                matrix.copy_(orthogonalize(matrix))
            return
        key = tuple(weights)
        if key not in self._plans:
            coordinates = cache(self._mesh.coordinates)
            spreads: list[Spread] = []
            for weight in weights.values():
                dimensions: tuple[str, ...] = ()
                if isinstance(weight, DTensor):
                    dimensions = weight.device_mesh.mesh_dim_names or ()
                spreads += _spreads(weight, coordinates(dimensions), self._rank)
            self._plans[key] = _plan(spreads, self._rank, self._ranks)
        plan = self._plans[key]
        group = self._mesh.stage
        like = parts[0]
        own = dict(zip(plan.held, held, strict=True))
        owned = {number: like.new_empty(size) for number, size in plan.owned.items()}
        for t, content in _transfer(group, plan.gather, lambda t: own[t.matrix], like):
            owned[t.matrix][t.box] = content.view_as(owned[t.matrix][t.box])
        owned = {number: orthogonalize(matrix) for number, matrix in owned.items()}
        for t, content in _transfer(group, plan.scatter, lambda t: owned[t.matrix][t.box], like):
            own[t.matrix].copy_(content.view_as(own[t.matrix]))


def _spreads(
    weight: torch.Tensor, coordinates: Sequence[Sequence[int]], rank: int
) -> Iterator[Spread]:
    """Yield where the matrices of a weight are; `coordinates` are those of all ranks."""
    placements: Sequence[Placement] = ()
    if isinstance(weight, DTensor):
        placements = weight.placements
    holders: dict[tuple[int, ...], list[int]] = {}
    own = ()
    for holder, coordinate in enumerate(coordinates):
        # Ranks that differ only in a replicated dimension hold the same shard.
        parts = zip(coordinate, placements, strict=True)
        shard = tuple(0 if placement.is_replicate() else part for part, placement in parts)
        holders.setdefault(shard, []).append(holder)
        if holder == rank:
            own = shard
    matrices = 1
    if weight.dim() == 3:
        matrices = len(weight)
    for number in range(matrices):
        yield Spread(weight, number, holders, own)


def _transfer(
    group: dist.ProcessGroup,
    route: Route,
    content: Callable[[Transfer], torch.Tensor],
    like: torch.Tensor,
) -> Iterator[tuple[Transfer, torch.Tensor]]:
    """Run the all-to-all of a route; return each transfer with the values received, flat."""
    sent = torch.cat([like.new_empty(0), *(content(t).flatten() for t in route.send)])
    received = send_rows(sent, group, route.send_sizes, route.recv_sizes)
    sizes = [_numel(t.box) for t in route.recv]
    return zip(route.recv, received.split(sizes), strict=True)


def _plan(spreads: Sequence[Spread], rank: int, ranks: int) -> RankPart:
    """Return the part of `rank` in a batch of matrices.

    All ranks agree on the owners. An owner computes transfers for all shards of its matrices, and
    other ranks only for their own, so the cost grows with the matrices of a batch, not with
    matrices times ranks.
    """
    owners = owners_of([spread.weight.shape[-2:] for spread in spreads], ranks)
    gather = []
    scatter = []
    held = []
    for number, (spread, owner) in enumerate(zip(spreads, owners, strict=True)):
        coordinates = [spread.own]
        if owner == rank:
            coordinates = [*spread.holders]
        for coordinate in coordinates:
            box = spread.box(coordinate)
            if not _numel(box):
                continue
            same = spread.holders[coordinate]
            # Replicas are the mesh's outermost dimension, so far apart: the owner's replica sends.
            sender = same[owner * len(same) // ranks]
            gather.append(Transfer(number, sender, owner, box))
            scatter += [Transfer(number, owner, holder, box) for holder in same]
            if coordinate == spread.own:
                held.append(number)
    owned = {n: spreads[n].weight.shape[-2:] for n, owner in enumerate(owners) if owner == rank}
    return RankPart(tuple(held), owned, Route(gather, rank, ranks), Route(scatter, rank, ranks))


def owners_of(shapes: Sequence[torch.Size], ranks: int) -> list[int]:
    """Return a rank for each matrix.

    The largest work is assigned first, each to the rank with the least work so far.
    """
    work = [min(shape) ** 2 * max(shape) for shape in shapes]
    loads = [(0, rank) for rank in range(ranks)]
    owners = [0] * len(shapes)
    for number in sorted(range(len(shapes)), key=lambda number: -work[number]):
        load, rank = heapq.heappop(loads)
        owners[number] = rank
        heapq.heappush(loads, (load + work[number], rank))
    return owners


def _numel(box: Box) -> int:
    return math.prod(part.stop - part.start for part in box)
