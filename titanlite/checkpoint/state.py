"""What is saved of a model and its optimizer: tensors under the plain model's names, the same on every mesh.

`model.NAME` for every parameter and persistent buffer, stored once if two modules share it; `optimizer.NAME.KEY` for
what the optimizer keeps for a parameter. Scalars (AdamW's step) are not tensors here but numbers in JSON. torch's
get_state_dict would run an optimizer step to create the state, and store 11 scalars per parameter. Under pipeline
parallel a rank has the tensors of its own stages.
"""

import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from titanlite.errors import UserError
from titanlite.parallel.build import named_parameters, persistent_buffers
from titanlite.parallel.dtensor import plain
from titanlite.registry import Rule
from titanlite.runtime.distributed import gather_objects

T = TypeVar("T")
Numbers = dict[str, float | int | bool]
Tensors = dict[str, torch.Tensor]


class TrainingState:
    """The tensors and numbers of one rank. The tensors are live: copy them to keep their values."""

    def __init__(
        self,
        parts: Iterable[nn.Module],
        optimizer: torch.optim.Optimizer | None,
        table: Mapping[str, Rule],
        stages: dist.ProcessGroup | None = None,
    ) -> None:
        """Without an optimizer there are only weights; the ranks of `stages` together hold the whole model."""
        self.parts, self._optimizer, self.stages = list(parts), optimizer, stages
        self._templates: dict[tuple[int, int, torch.dtype, torch.device], dict[str, Any]] = {}
        self._names = {p: name for part in self.parts for name, p in named_parameters(part, table)}

    def of_all_stages(self, own: Mapping[str, T]) -> dict[str, T]:
        """Join what each stage has by name; of a tensor that two hold, the first one's."""
        by_stage = gather_objects(dict(own), self.stages)
        return {name: value for stage in reversed(by_stage) for name, value in stage.items()}

    def weights(self) -> dict[str, torch.Tensor]:
        """Return parameters, frozen ones too, and persistent buffers."""
        tensors: dict[str, torch.Tensor] = {f"model.{name}": plain(p) for p, name in self._names.items()}
        for part in self.parts:
            tensors |= {f"model.{name}": buffer for name, buffer in persistent_buffers(part).items()}
        return tensors

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the weights, and what the optimizer keeps in the shape of a parameter."""
        return self.weights() | {name: value for name, _, value in self._entries() if not _is_scalar(value)}

    def numbers(self) -> Numbers:
        """Return the scalars of all stages, synchronizing once per device and type instead of once per scalar."""
        numbers: Numbers = {}
        stacks: dict[tuple[torch.device, torch.dtype], dict[str, torch.Tensor]] = defaultdict(dict)
        for name, _, value in self._entries():
            if not isinstance(value, torch.Tensor):
                numbers[name] = value
            elif _is_scalar(value):
                stacks[value.device, value.dtype][name] = value
        for stack in stacks.values():
            numbers |= zip(stack, torch.stack(list(stack.values())).tolist(), strict=True)
        return self.of_all_stages(numbers)

    def set_numbers(self, numbers: Numbers) -> None:
        """Set those of this rank's scalars that are named."""
        for name, state, value in self._entries():
            if name in numbers and isinstance(value, torch.Tensor):
                value.fill_(numbers[name])
            elif name in numbers:
                state[name.rpartition(".")[2]] = numbers[name]

    def _entries(self) -> Iterator[tuple[str, dict[str, Any], Any]]:
        """Yield name, containing dict and value of all optimizer state. What does not exist yet is created as zeros:
        a parameter has no state before its first gradient."""
        assert self._optimizer is not None
        for number, group in enumerate(self._optimizer.param_groups):
            for parameter in group["params"]:
                state = self._optimizer.state[parameter]
                if not state:
                    kind = (number, parameter.dim(), parameter.dtype, parameter.device)
                    if kind not in self._templates:
                        self._templates[kind] = _state_after_a_step(self._optimizer, group, parameter)
                    state |= {key: _zeros(value, parameter) for key, value in self._templates[kind].items()}
                for key, value in state.items():
                    if value is not None:
                        name = f"optimizer.{self._names[parameter]}.{key}"
                        _check(name, value, parameter.shape)
                        yield name, state, value


def _state_after_a_step(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor
) -> dict[str, Any]:
    """Return what an optimizer keeps for a parameter of this kind, from a step on a probe of two per dimension.

    A step of the real optimizer with zero gradients would need memory for all of them, run its hooks and collectives,
    and be repeated at each save by optimizers that keep no state.
    """
    trial = copy.copy(optimizer)  # copied as pickle would: without hooks
    trial.__dict__ |= {name: value for name, value in optimizer.__dict__.items() if name not in trial.__dict__}
    probe = nn.Parameter(torch.zeros((2,) * parameter.dim(), dtype=parameter.dtype, device=parameter.device))
    probe.grad = torch.zeros_like(probe)
    nameless = {key: value for key, value in group.items() if key != "param_names"}  # not a model parameter
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


def _is_scalar(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or (value.dim() == 0 and not isinstance(value, DTensor))


def _check(name: str, value: Any, shape: torch.Size) -> None:
    """Raise unless an optimizer's value is a tensor of its parameter's shape, or one number."""
    if isinstance(value, torch.Tensor):
        fits, what = value.shape in (shape, ()), f"a tensor of shape {list(value.shape)}"
    else:
        fits, what = value is None or isinstance(value, float | int), repr(value)
    if not fits:
        raise UserError(
            f"{name} is {what} for a parameter of shape {list(shape)}: checkpoints hold tensors of the parameter's "
            "shape, and single numbers"
        )
