"""Optimizer state in bfloat16, with stochastic rounding, for any torch optimizer.

A step converts the state of a few parameters at a time to float32, and rounds the new state up or
down at random so that its mean is unbiased. (Rounded to nearest, a running mean stops moving once
it changes by less than 1/256.) The random bits are a hash of seed, step, parameter name and index
in the full tensor: the same on every mesh and after a resume.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanlite.optim.update import update
from titanlite.parallel.dtensor import box_of, local_part
from titanlite.runtime.determinism import derive_seed

MAX_NUMEL = 1 << 26
"""The most elements of a rank's parameters whose state is in float32 at one time."""


def chunk_by_numel(
    parameters: Sequence[torch.Tensor], max_numel: int = MAX_NUMEL, min_count: int = 1
) -> Iterator[slice]:
    """Yield slices of at most `max_numel` elements, but of at least `min_count` matrices.

    They are the same on all ranks: a sharded parameter counts as its largest shard.
    """
    start = 0
    matrices = 0
    elements = 0
    for number, parameter in enumerate(parameters):
        numel = _largest_shard(parameter)
        if matrices >= min_count and elements + numel > max_numel:
            yield slice(start, number)
            start = number
            matrices = 0
            elements = 0
        if parameter.dim() == 3:  # a matrix for each expert
            matrices += len(parameter)
        else:
            matrices += 1
        elements += numel
    if parameters:
        yield slice(start, len(parameters))


def _largest_shard(parameter: torch.Tensor) -> int:
    numel = parameter.numel()
    if isinstance(parameter, DTensor):
        for size, placement in zip(parameter.device_mesh.shape, parameter.placements, strict=True):
            if not placement.is_replicate():
                numel = -(-numel // size)
    return numel


class BF16State(torch.optim.Optimizer):
    """Wraps an optimizer and keeps its state in bfloat16 between steps."""

    is_like_fused_adam = True
    """The inner optimizer skips its steps, and rounding does not change bfloat16 values."""
    grad_scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None

    def __init__(self, inner: torch.optim.Optimizer, seed: int, backend: str = "") -> None:
        """With a backend of torch.compile, one kernel instead of 40 rounds two tensors."""
        super().__init__(inner.param_groups, inner.defaults)
        self._inner = inner
        self._seed = seed
        self._round: Callable[..., None] = _round
        if backend:
            self._round = torch.compile(_round, dynamic=True, backend=backend)
        self._boxes = {}  # computed once, since box_of is slow
        for group in self.param_groups:
            self._boxes |= {parameter: box_of(parameter) for parameter in group["params"]}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            parameters = group["params"]
            unnamed = [""] * len(parameters)
            names = group.get("param_names", unnamed)
            for run in chunk_by_numel(parameters):
                self._step(group, parameters[run], names[run])

    def _step(
        self, group: dict[str, Any], parameters: list[nn.Parameter], names: list[str]
    ) -> None:
        inner = self._inner
        fp32 = {p: _to_fp32(p) for p in parameters}
        inner.param_groups = [{**group, "params": [*fp32.values()], "param_names": names}]
        inner.state = defaultdict(dict)
        for parameter, copy in fp32.items():
            for key, value in self.state[parameter].items():
                if _is_state_tensor(value):
                    value = value.to(copy.dtype)
                inner.state[copy][key] = value
        update(inner, self.grad_scale, self.found_inf)
        step = group.get("training_step", 0)
        for name, (parameter, copy) in zip(names, fp32.items(), strict=True):
            if copy is not parameter:
                parameter.copy_(copy)
            self._store_rounded(parameter, inner.state[copy], name, step)
        inner.param_groups = []  # frees the float32 parameters,
        inner.state = defaultdict(dict)  # and their state

    def _store_rounded(
        self, parameter: nn.Parameter, state: dict[str, Any], name: str, step: int
    ) -> None:
        """Keep a parameter's new state, its tensors rounded to bfloat16."""
        stored = self.state[parameter]
        stored.update({k: value for k, value in state.items() if not _is_state_tensor(value)})
        tensors = {k: value for k, value in state.items() if _is_state_tensor(value)}
        for key, value in tensors.items():  # their order decides which gets which bits
            if key not in stored:
                stored[key] = torch.empty_like(value, dtype=torch.bfloat16)
        box = self._boxes.get(parameter) or box_of(parameter)
        keys = [*tensors]
        for pair in range(0, len(keys), 2):  # two tensors share the 32 bits of a hash
            seed = derive_seed("rounding", self._seed, step, name, pair // 2) % 2**31
            shared = keys[pair : pair + 2]
            targets = [local_part(stored[key]) for key in shared]
            values = [local_part(tensors[key]) for key in shared]
            self._round(targets, values, [region.start for region in box], seed)


def _to_fp32(parameter: nn.Parameter) -> nn.Parameter:
    """Return the parameter, or a float32 copy of a bfloat16 one, with its gradient."""
    if parameter.dtype != torch.bfloat16:
        return parameter
    copy = nn.Parameter(parameter.float())
    if parameter.grad is not None:
        copy.grad = parameter.grad.float()
    return copy


def _is_state_tensor(value: Any) -> bool:
    """Return whether a value of the state has its parameter's shape, unlike a scalar."""
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 0


def _round(targets: list[Tensor], values: list[Tensor], starts: list[int], seed: int) -> None:
    """Round at most two tensors of one region, which begins at `starts` in the full tensor."""
    box = [slice(start, start + size) for start, size in zip(starts, values[0].shape, strict=True)]
    bits = random_bits(box, seed, values[0].device)
    for number, (target, value) in enumerate(zip(targets, values, strict=True)):
        if number:
            bits = bits >> 16
        target.copy_(round_at_random(value, bits))


def round_at_random(values: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Round each value to one of its two bfloat16 neighbors so that the mean is unbiased.

    The low 16 of its random bits decide.
    """
    values = values.float()
    up = (values.view(torch.int32) + (bits & 0xFFFF)) & ~0xFFFF
    # An infinite value keeps its bits.
    return torch.where(values.isnan(), values, up.view(torch.float32)).bfloat16()


def random_bits(box: Sequence[slice], seed: int, device: torch.device) -> torch.Tensor:
    """Return 32 bits for each element of a region; they depend on its index in the full tensor."""
    bits = torch.full((), seed, dtype=torch.int32, device=device)
    for region in box:
        indices = torch.arange(region.start, region.stop, dtype=torch.int32, device=device)
        bits = _mix(bits.unsqueeze(-1) + indices)
    return bits


def _mix(bits: torch.Tensor) -> torch.Tensor:
    """Make each output bit depend on all input bits (MurmurHash3's last step); products wrap."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        shifted = bits >> shift & (1 << 32 - shift) - 1
        bits = (bits ^ shifted) * (factor - 2**32)
    return bits ^ (bits >> 16 & 0xFFFF)
