"""Optimizer state in bfloat16, rounded up or down at random so that the mean is right.

Any torch optimizer can be kept so. For its step, the state of some parameters at a time is widened to float32, the
optimizer computes as ever, and what it leaves is rounded. (To the nearest bfloat16, a running mean would stop moving
as soon as its changes are below 1/256 of it.) The random bits are a hash of the seed, the step, the parameter's name
and the element's place in the full tensor: the same on every mesh, and after a resume.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from titanlite.parallel.dtensor import box_of, local_part
from titanlite.registry import Box
from titanlite.runtime.determinism import derive_seed

ELEMENTS_AT_A_TIME = 1 << 26


def chunk_by_numel(
    parameters: Sequence[torch.Tensor], most: int = ELEMENTS_AT_A_TIME, least: int = 1
) -> Iterator[slice]:
    """Runs of parameters of which a rank holds no more than so many elements, or of the least number; the same on
    every rank."""
    first, held = 0, 0
    for number, parameter in enumerate(parameters):
        mine = parameter.numel()
        if isinstance(parameter, DTensor):
            for size, placement in zip(parameter.device_mesh.shape, parameter.placements, strict=True):
                mine = mine if placement.is_replicate() else -(-mine // size)
        if number - first >= least and held + mine > most:
            yield slice(first, number)
            first, held = number, 0
        held += mine
    if parameters:
        yield slice(first, len(parameters))


class BF16State(torch.optim.Optimizer):
    """Another optimizer, whose state is bfloat16 between its steps."""

    def __init__(self, inner: torch.optim.Optimizer, seed: int) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self._inner, self._seed = inner, seed
        self._boxes = {p: box_of(p) for group in self.param_groups for p in group["params"]}  # slow to ask for

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            names = group.get("param_names", [""] * len(group["params"]))
            for run in chunk_by_numel(group["params"]):
                self._step(group, group["params"][run], names[run])

    def _step(self, group: dict[str, Any], parameters: list[nn.Parameter], names: list[str]) -> None:
        wide = {p: _widened(p) for p in parameters}
        self._inner.param_groups = [{**group, "params": [*wide.values()], "param_names": names}]
        self._inner.state = defaultdict(dict)
        for parameter, stand_in in wide.items():
            for key, value in self.state[parameter].items():
                self._inner.state[stand_in][key] = value.to(stand_in.dtype) if _narrows(value) else value
        self._inner.step()
        for name, (parameter, stand_in) in zip(names, wide.items(), strict=True):
            if stand_in is not parameter:
                parameter.copy_(stand_in)
            self._keep(parameter, self._inner.state[stand_in], name, group.get("training_step", 0))
        self._inner.param_groups, self._inner.state = [], defaultdict(dict)  # what was wide can go

    def _keep(self, parameter: nn.Parameter, state: dict[str, Any], name: str, step: int) -> None:
        """Take over a parameter's state; what is large is rounded."""
        kept, bits = self.state[parameter], torch.empty(0)
        box = self._boxes.get(parameter) or box_of(parameter)
        large = [key for key, value in state.items() if _narrows(value)]
        for key, value in state.items():
            if key not in large:
                kept[key] = value
                continue
            number, second = divmod(large.index(key), 2)
            if not second:  # two tensors share the 32 bits of a hash
                seed = derive_seed("rounding", self._seed, step, name, number) % 2**31
                bits = random_bits(box, seed, local_part(value).device)
            if key not in kept:
                kept[key] = torch.empty_like(value, dtype=torch.bfloat16)
            local_part(kept[key]).copy_(rounded(local_part(value), bits >> 16 if second else bits))


def _widened(parameter: nn.Parameter) -> nn.Parameter:
    """The parameter, or what stands in for it in float32."""
    if parameter.dtype != torch.bfloat16:
        return parameter
    stand_in = nn.Parameter(parameter.float())
    stand_in.grad = None if parameter.grad is None else parameter.grad.float()
    return stand_in


def _narrows(value: Any) -> bool:
    """Whether a value of the state is of a parameter's shape; numbers stay as they are."""
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 0


def rounded(wide: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """One of the two bfloat16 neighbours of each value, by the low 16 of its random bits; the mean is the value."""
    wide = wide.float()
    up = (wide.view(torch.int32) + (bits & 0xFFFF)) & ~0xFFFF
    return torch.where(wide.isfinite(), up.view(torch.float32), wide).bfloat16()


def random_bits(box: Box, seed: int, device: torch.device) -> torch.Tensor:
    """32 bits for each element of a part of a tensor, by its place in the full tensor alone."""
    bits = torch.full((), seed, dtype=torch.int32, device=device)
    for part in box:
        places = torch.arange(part.start, part.stop, dtype=torch.int32, device=device)
        bits = _mixed(bits.unsqueeze(-1) + places)
    return bits


def _mixed(bits: torch.Tensor) -> torch.Tensor:
    """Each output bit depends on all input bits (the last step of MurmurHash3); products wrap around."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = (bits ^ (bits >> shift & (1 << 32 - shift) - 1)) * (factor - 2**32)
    return bits ^ (bits >> 16 & 0xFFFF)
