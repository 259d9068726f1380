"""Optimizer state in bfloat16, with stochastic rounding, for any torch optimizer.

A step converts the state of a few parameters at a time to float32, and rounds the new state up or down at random so
that the mean is right. (Rounded to nearest, a running mean stops moving once it changes by less than 1/256.) The bits
are a hash of seed, step, parameter name and index in the full tensor: the same on every mesh and after a resume.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from titanlite.optim.skip import step_unless
from titanlite.parallel.dtensor import box_of, local_part
from titanlite.registry import Box
from titanlite.runtime.determinism import derive_seed

MAX_NUMEL = 1 << 26
"""Elements of a rank's parameters whose state is in float32 at a time."""


def chunk_by_numel(
    parameters: Sequence[torch.Tensor], max_numel: int = MAX_NUMEL, min_count: int = 1
) -> Iterator[slice]:
    """Split parameters into runs, equal on all ranks, of at most `max_numel` elements or of `min_count` matrices."""
    start, run_count, run_numel = 0, 0, 0
    for number, parameter in enumerate(parameters):
        numel = parameter.numel()
        if isinstance(parameter, DTensor):
            for size, placement in zip(parameter.device_mesh.shape, parameter.placements, strict=True):
                numel = numel if placement.is_replicate() else -(-numel // size)
        if run_count >= min_count and run_numel + numel > max_numel:
            yield slice(start, number)
            start, run_count, run_numel = number, 0, 0
        run_count += len(parameter) if parameter.dim() == 3 else 1  # of experts each has a matrix
        run_numel += numel
    if parameters:
        yield slice(start, len(parameters))


class BF16State(torch.optim.Optimizer):
    """Wrap an optimizer and keep its state in bfloat16 between steps."""

    takes_found_inf = True  # the inner one skips its steps, and rounding changes nothing that is in bfloat16
    found_inf: torch.Tensor | None = None

    def __init__(self, inner: torch.optim.Optimizer, seed: int) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self._inner, self._seed = inner, seed
        self._boxes = {p: box_of(p) for group in self.param_groups for p in group["params"]}  # slow to compute

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            names = group.get("param_names", [""] * len(group["params"]))
            for run in chunk_by_numel(group["params"]):
                self._step(group, group["params"][run], names[run])

    def _step(self, group: dict[str, Any], parameters: list[nn.Parameter], names: list[str]) -> None:
        fp32 = {p: _to_fp32(p) for p in parameters}
        self._inner.param_groups = [{**group, "params": [*fp32.values()], "param_names": names}]
        self._inner.state = defaultdict(dict)
        for parameter, copy in fp32.items():
            for key, value in self.state[parameter].items():
                self._inner.state[copy][key] = value.to(copy.dtype) if _is_state_tensor(value) else value
        step_unless(None if self.found_inf is None else self.found_inf > 0, self._inner)
        for name, (parameter, copy) in zip(names, fp32.items(), strict=True):
            if copy is not parameter:
                parameter.copy_(copy)
            self._store_rounded(parameter, self._inner.state[copy], name, group.get("training_step", 0))
        self._inner.param_groups, self._inner.state = [], defaultdict(dict)  # frees the float32 tensors

    def _store_rounded(self, parameter: nn.Parameter, state: dict[str, Any], name: str, step: int) -> None:
        """Keep a parameter's new state, its tensors rounded to bfloat16."""
        stored, bits = self.state[parameter], torch.empty(0)
        stored.update({key: value for key, value in state.items() if not _is_state_tensor(value)})
        box = self._boxes.get(parameter) or box_of(parameter)
        tensors = [(key, value) for key, value in state.items() if _is_state_tensor(value)]
        for number, (key, value) in enumerate(tensors):
            if number % 2 == 0:  # two tensors share the 32 bits of a hash
                seed = derive_seed("rounding", self._seed, step, name, number // 2) % 2**31
                bits = random_bits(box, seed, local_part(value).device)
            if key not in stored:
                stored[key] = torch.empty_like(value, dtype=torch.bfloat16)
            local_part(stored[key]).copy_(round_at_random(local_part(value), bits >> 16 if number % 2 else bits))


def _to_fp32(parameter: nn.Parameter) -> nn.Parameter:
    """Return the parameter, or a float32 copy of a bfloat16 one, with its gradient."""
    if parameter.dtype != torch.bfloat16:
        return parameter
    copy = nn.Parameter(parameter.float())
    copy.grad = None if parameter.grad is None else parameter.grad.float()
    return copy


def _is_state_tensor(value: Any) -> bool:
    """Return whether a value of the state has a parameter's shape; scalars are kept as they are."""
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 0


def round_at_random(values: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Round each value to one of its two bfloat16 neighbors, by the low 16 of its random bits; the mean is right."""
    values = values.float()
    up = (values.view(torch.int32) + (bits & 0xFFFF)) & ~0xFFFF
    return torch.where(values.isfinite(), up.view(torch.float32), values).bfloat16()


def random_bits(box: Box, seed: int, device: torch.device) -> torch.Tensor:
    """Return 32 bits for each element of a region of a tensor, by its index in the full tensor only."""
    bits = torch.full((), seed, dtype=torch.int32, device=device)
    for region in box:
        indices = torch.arange(region.start, region.stop, dtype=torch.int32, device=device)
        bits = _mix(bits.unsqueeze(-1) + indices)
    return bits


def _mix(bits: torch.Tensor) -> torch.Tensor:
    """Let each output bit depend on all input bits (MurmurHash3's last step); products wrap around."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = (bits ^ (bits >> shift & (1 << 32 - shift) - 1)) * (factor - 2**32)
    return bits ^ (bits >> 16 & 0xFFFF)
