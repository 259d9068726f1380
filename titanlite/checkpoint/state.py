"""What is saved of a model and its optimizer: tensors by plain names, the same on every mesh.

`model.NAME` for every parameter and persistent buffer, one that two modules share once; `optimizer.NAME.KEY` for
what the optimizer keeps for a parameter. Single numbers (AdamW's step) are not tensors here, but numbers.
torch's get_state_dict would run an optimizer step to make the state, and store 11 scalars a parameter.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from titanlite.errors import UserError
from titanlite.parallel.dtensor import plain

Numbers = dict[str, float | int | bool]


@dataclass(frozen=True)
class Position:
    """Where a job stands. Samples are counted, not steps: the global batch may change."""

    step: int
    tokens: int
    consumed: int
    """Samples of the data that were trained on."""
    epoch: int
    seed: int
    fingerprint: str
    """Of the data."""


class TrainingState:
    """The tensors and numbers of one rank. The tensors are live: whoever wants them to stay copies them."""

    def __init__(self, parts: Iterable[nn.Module], optimizer: torch.optim.Optimizer | None) -> None:
        """Without an optimizer there are the weights alone."""
        self._parts, self._optimizer = list(parts), optimizer
        self._learned: dict[tuple[int, int, torch.dtype, torch.device], dict[str, Any]] = {}
        self._names = {parameter: name for part in self._parts for name, parameter in part.named_parameters()}

    def weights(self) -> dict[str, torch.Tensor]:
        """Parameters, the frozen ones too, and persistent buffers."""
        found: dict[str, torch.Tensor] = {f"model.{name}": plain(p) for p, name in self._names.items()}
        for part in self._parts:
            kept = part.state_dict(keep_vars=True)
            found |= {f"model.{name}": buffer for name, buffer in part.named_buffers() if name in kept}
        return found

    def tensors(self) -> dict[str, torch.Tensor]:
        """The weights, and what the optimizer keeps in the shape of a parameter."""
        state = {name: value for name, _, value in self._entries() if _is_tensor(value)}
        return {**self.weights(), **state}

    def numbers(self) -> Numbers:
        """The optimizer's single numbers; a device is waited for once, not once for each."""
        entries = [(name, value) for name, _, value in self._entries() if not _is_tensor(value)]
        found: Numbers = {name: value for name, value in entries if not isinstance(value, torch.Tensor)}
        stacks: dict[tuple[torch.device, torch.dtype], dict[str, torch.Tensor]] = defaultdict(dict)
        for name, value in entries:
            if isinstance(value, torch.Tensor):
                stacks[value.device, value.dtype][name] = value
        for stack in stacks.values():
            found |= zip(stack, torch.stack(list(stack.values())).tolist(), strict=True)
        return found

    def set_numbers(self, numbers: Numbers) -> None:
        """Put back what `numbers` gave, those that are named."""
        for name, state, value in self._entries():
            if name in numbers and isinstance(value, torch.Tensor):
                value.fill_(numbers[name])
            elif name in numbers:
                state[name.rpartition(".")[2]] = numbers[name]

    def _entries(self) -> Iterator[tuple[str, dict[str, Any], Any]]:
        """Name, holder and value of everything in the optimizer's state. What does not exist yet is made, as zeros:
        before its first gradient a parameter has no state, and most new optimizers have none at all."""
        assert self._optimizer is not None
        for number, group in enumerate(self._optimizer.param_groups):
            for parameter in group["params"]:
                state = self._optimizer.state[parameter]
                if not state:
                    kind = (number, parameter.dim(), parameter.dtype, parameter.device)
                    if kind not in self._learned:
                        self._learned[kind] = _state_after_a_step(self._optimizer, group, parameter)
                    state |= {key: _zeros(value, parameter) for key, value in self._learned[kind].items()}
                for key, value in state.items():
                    if value is not None:
                        name = f"optimizer.{self._names[parameter]}.{key}"
                        _check(name, value, parameter.shape)
                        yield name, state, value


def _state_after_a_step(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor
) -> dict[str, Any]:
    """What an optimizer keeps for a parameter of this kind, learned from a step on two elements a dimension."""
    trial = copy.copy(optimizer)  # as pickle would: without hooks
    trial.__dict__ |= {name: value for name, value in optimizer.__dict__.items() if name not in trial.__dict__}
    shape = (2,) * parameter.dim()
    probe = nn.Parameter(torch.zeros(shape, dtype=parameter.dtype, device=parameter.device))
    probe.grad = torch.zeros_like(probe)
    nameless = {key: value for key, value in group.items() if key != "param_names"}  # it is none of the model's
    trial.state, trial.param_groups = defaultdict(dict), [{**nameless, "params": [probe]}]
    trial.step()
    for key, value in trial.state[probe].items():
        _check(f"{type(optimizer).__name__}: {key}", value, probe.shape)
    return dict(trial.state[probe])


def _zeros(example: Any, parameter: torch.Tensor) -> Any:
    if not isinstance(example, torch.Tensor):
        return None if example is None else type(example)()
    if example.dim() == 0:
        return torch.zeros_like(example)
    return torch.zeros_like(parameter, dtype=example.dtype, requires_grad=False)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.dim() > 0 or isinstance(value, DTensor))


def _check(name: str, value: Any, shape: torch.Size) -> None:
    """An optimizer's value must be a tensor of its parameter's shape, or one number."""
    if isinstance(value, torch.Tensor):
        fits, what = value.shape in (shape, ()), f"a tensor of shape {list(value.shape)}"
    else:
        fits, what = value is None or isinstance(value, float | int), repr(value)
    if not fits:
        raise UserError(
            f"{name} is {what} for a parameter of shape {list(shape)}: checkpoints hold tensors of the parameter's "
            "shape, and single numbers"
        )
