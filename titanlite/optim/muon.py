"""Muon: the momentum of a hidden matrix is orthogonalized before it is added; AdamW takes all other parameters.

The algorithm is torch.optim.Muon's. There each operation on a sharded matrix communicates; here a matrix is gathered
once, by one rank that owns it, orthogonalized there, and the parts of the result are sent to where they belong: two
all-to-alls for a batch of matrices, whatever the mesh. A batch has a matrix for every rank, where there are as many,
and its owners have about equal work.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from titanlite.config.schema import JobConfig
from titanlite.errors import UserError
from titanlite.optim.bf16_state import chunk_by_numel
from titanlite.optim.build import TrainedParam, adam_options, groups
from titanlite.parallel.dtensor import box_of, local_part
from titanlite.registry import Box

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic that is applied to the singular values: steep at 0, near 1 for all others after five steps."""
ITERATIONS = 5
EPS = 1e-7


def muon(trained: Sequence[TrainedParam], config: JobConfig) -> torch.optim.Optimizer:
    """Muon for the hidden matrices, computing in the type of the forward pass; AdamW for the rest."""
    matrices = [item for item in trained if item.is_hidden_matrix]
    if not matrices:
        raise UserError("optimizer.name: Muon finds no trained matrix inside of the model's blocks; use AdamW")
    others = [item for item in trained if not item.is_hidden_matrix]
    parameters = [
        *groups(matrices, config.optimizer, matrices=True),
        *groups(others, config.optimizer, matrices=False),
    ]
    dtype = getattr(torch, config.training.mixed_precision_param)
    return Muon(parameters, dtype, **adam_options(config.optimizer))


def orthogonalized(matrix: torch.Tensor) -> torch.Tensor:
    """U V' of a matrix U S V', about, by Newton-Schulz iterations in the matrix's own type."""
    a, b, c = COEFFICIENTS
    flat = matrix if matrix.size(0) <= matrix.size(1) else matrix.T
    flat = flat / flat.norm().clamp(min=EPS)
    for _ in range(ITERATIONS):
        gram = flat @ flat.T
        flat = torch.addmm(flat, torch.addmm(gram, gram, gram, beta=b, alpha=c), flat, beta=a)
    return flat if matrix.size(0) <= matrix.size(1) else flat.T


@dataclass(frozen=True)
class Transfer:
    """A part of a matrix on its way from a rank to another."""

    matrix: int
    source: int
    target: int
    box: Box


class Route:
    """One collective: the parcels that this rank sends, in the order of their targets, and those that arrive, in the
    order of their sources."""

    def __init__(self, parcels: Sequence[Transfer], rank: int, ranks: int) -> None:
        self.out = sorted((p for p in parcels if p.source == rank), key=lambda p: p.target)
        self.come = sorted((p for p in parcels if p.target == rank), key=lambda p: p.source)
        self.out_sizes, self.recv_sizes = [0] * ranks, [0] * ranks
        for parcel in self.out:
            self.out_sizes[parcel.target] += _elements(parcel.box)
        for parcel in self.come:
            self.recv_sizes[parcel.source] += _elements(parcel.box)


@dataclass(frozen=True)
class Plan:
    """What this rank does for a batch of matrices."""

    owned: tuple[int, ...]
    gather: Route
    scatter: Route


class Muon(torch.optim.AdamW):
    """AdamW, but for the groups with `matrices`."""

    def __init__(self, parameters: list[dict[str, Any]], dtype: torch.dtype, **adamw: Any) -> None:
        super().__init__(parameters, **adamw)
        self._dtype = dtype
        several = dist.is_initialized() and dist.get_world_size() > 1
        self._rank, self._ranks = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
        mine = {
            name: box_of(matrix)
            for group in self.param_groups
            if group["matrices"]
            for name, matrix in zip(group["param_names"], group["params"], strict=True)
        }
        everyone = [mine] * self._ranks
        if several:
            dist.all_gather_object(everyone, mine)
        self._boxes = {name: tuple(boxes[name] for boxes in everyone) for name in mine}
        self._plans: dict[tuple[str, ...], Plan] = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.optim.Optimizer.__setstate__(self, state)  # AdamW's own expects a `step` in every parameter's state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        every = self.param_groups
        try:
            self.param_groups = [group for group in every if not group["matrices"]]
            super().step()
        finally:
            self.param_groups = every
        matrices = [
            (name, matrix, group)
            for group in every
            if group["matrices"]
            # A matrix without a name is a stranger's, such as one that shows what the state looks like.
            for name, matrix in zip(group.get("param_names", [""]), group["params"], strict=True)
            if matrix.grad is not None
        ]
        for run in chunk_by_numel([matrix for _, matrix, _ in matrices], least=self._ranks):  # work for every rank
            self._step_together(matrices[run])

    def _step_together(self, matrices: list[tuple[str, torch.Tensor, dict[str, Any]]]) -> None:
        updates = self._orthogonalised(
            [name for name, _, _ in matrices],
            [matrix.shape for _, matrix, _ in matrices],
            [self._momentum(matrix) for _, matrix, _ in matrices],
        )
        for (_, matrix, group), update in zip(matrices, updates, strict=True):
            local, lr = local_part(matrix), group["lr"]
            local.mul_(1 - lr * group["weight_decay"])
            # As large, by root mean square, as AdamW's usual step: one rate serves both.
            local.add_(update, alpha=-lr * 0.2 * max(matrix.shape) ** 0.5)

    def _momentum(self, matrix: torch.Tensor) -> torch.Tensor:
        """This rank's part of the matrix's gradient, with Nesterov's momentum."""
        state = self.state[matrix]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(matrix, requires_grad=False)
        assert matrix.grad is not None
        gradient, running = local_part(matrix.grad), local_part(state["momentum_buffer"])
        running.lerp_(gradient, 1 - MOMENTUM)
        return gradient.lerp(running, MOMENTUM).to(self._dtype)

    def _orthogonalised(
        self, names: list[str], shapes: list[torch.Size], parts: list[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """This rank's parts of the orthogonalized matrices, of whose momentum it has the parts."""
        if self._ranks == 1 or names == [""]:
            return [orthogonalized(part) for part in parts]
        key = tuple(names)
        if key not in self._plans:
            self._plans[key] = _plan([self._boxes[name] for name in names], shapes, self._rank)
        plan, like = self._plans[key], parts[0]
        whole = {number: like.new_empty(shapes[number]) for number in plan.owned}
        for parcel, content in _exchange(plan.gather, lambda parcel: parts[parcel.matrix], like):
            whole[parcel.matrix][parcel.box] = content.view_as(whole[parcel.matrix][parcel.box])
        whole = {number: orthogonalized(matrix) for number, matrix in whole.items()}
        for parcel, content in _exchange(plan.scatter, lambda p: whole[p.matrix][p.box], like):
            parts[parcel.matrix] = content.view_as(parts[parcel.matrix])
        return parts


def _exchange(
    route: Route, content: Callable[[Transfer], torch.Tensor], like: torch.Tensor
) -> Iterator[tuple[Transfer, torch.Tensor]]:
    """Send what starts here, and return what arrives."""
    sent = torch.cat([like.new_empty(0), *(content(parcel).flatten() for parcel in route.out)])
    received = like.new_empty(sum(route.recv_sizes))
    dist.all_to_all_single(received, sent, route.recv_sizes, route.out_sizes)
    return zip(route.come, received.split([_elements(parcel.box) for parcel in route.come]), strict=True)


def _plan(boxes: list[tuple[Box, ...]], shapes: list[torch.Size], rank: int) -> Plan:
    """Who owns which matrix of a batch, and what of it goes through `rank`; all ranks find the same owners."""
    ranks = len(boxes[0])
    owners = owners_of(shapes, ranks)
    gather, scatter = [], []
    for number, (by_rank, owner) in enumerate(zip(boxes, owners, strict=True)):
        holders: dict[tuple[tuple[int, int], ...], list[Transfer]] = {}
        for other, box in enumerate(by_rank):
            if _elements(box):
                scatter.append(Transfer(number, owner, other, box))
                place = tuple((part.start, part.stop) for part in box)
                holders.setdefault(place, []).append(Transfer(number, other, owner, box))
        # Replicas are the mesh's outermost dimension, and far apart: each owner's own one sends.
        gather += [same[owner * len(same) // ranks] for same in holders.values()]
    owned = tuple(number for number, owner in enumerate(owners) if owner == rank)
    return Plan(owned, Route(gather, rank, ranks), Route(scatter, rank, ranks))


def owners_of(shapes: Sequence[torch.Size], ranks: int) -> list[int]:
    """A rank for each matrix: the largest work first, each to whoever has least."""
    work = [min(shape) ** 2 * max(shape) for shape in shapes]
    loads = [(0, rank) for rank in range(ranks)]
    owners = [0] * len(shapes)
    for number in sorted(range(len(shapes)), key=lambda number: -work[number]):
        load, owners[number] = heapq.heappop(loads)
        heapq.heappush(loads, (load + work[number], owners[number]))
    return owners


def _elements(box: Box) -> int:
    size = 1
    for part in box:
        size *= part.stop - part.start
    return size
