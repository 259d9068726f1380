"""The state of a model and its optimizer in a checkpoint: tensors by the plain model's names.

The names are the same on every mesh: `model.NAME` for every parameter and persistent buffer, stored
once if two modules share it; `optimizer.NAME.KEY` for each of the optimizer's values for a
parameter. Scalars (AdamW's step) are stored as numbers in JSON, not as tensors. torch's
get_state_dict would run an optimizer step to create the state, and store 11 scalars per parameter.
Under pipeline parallel a rank has the tensors of its own stages.
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
    """The tensors and numbers of one rank. The tensors are live; copy them to keep their values."""

    def __init__(
        self,
        parts: Iterable[nn.Module],
        optimizer: torch.optim.Optimizer | None,
        table: Mapping[str, Rule],
        stages: dist.ProcessGroup | None = None,
    ) -> None:
        """Without an optimizer, there are only weights. The ranks of `stages` together hold the
        whole model.
        """
        self.parts = list(parts)
        self.stages = stages
        self._optimizer = optimizer
        self._templates: dict[tuple[int, int, torch.dtype, torch.device], dict[str, Any]] = {}
        self._names: dict[torch.Tensor, str] = {}
        for part in self.parts:
            for name, parameter in named_parameters(part, table):
                self._names[parameter] = name

    def of_all_stages(self, own: Mapping[str, T]) -> dict[str, T]:
        """Merge the dicts of all stages; a tied tensor comes from the first stage."""
        merged: dict[str, T] = {}
        for stage in reversed(gather_objects(dict(own), self.stages)):
            merged |= stage
        return merged

    def weights(self) -> dict[str, torch.Tensor]:
        """Return parameters, including frozen ones, and persistent buffers."""
        tensors: dict[str, torch.Tensor] = {}
        for parameter, name in self._names.items():
            tensors[f"model.{name}"] = plain(parameter)
        for part in self.parts:
            for name, buffer in persistent_buffers(part).items():
                tensors[f"model.{name}"] = buffer
        return tensors

    def frozen(self) -> Tensors:
        """Return the parameters that are not trained."""
        names = self._names.items()
        return {f"model.{name}": plain(each) for each, name in names if not each.requires_grad}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the weights, and the optimizer's tensors that have a parameter's shape."""
        tensors = self.weights()
        for name, _, value in self._entries():
            if not _is_scalar(value):
                tensors[name] = value
        return tensors

    def chosen(self, weights_only: bool, whole: bool) -> Tensors:
        """Return the tensors for a checkpoint, without frozen parameters unless `whole`."""
        tensors = self.weights() if weights_only else self.tensors()
        if not whole:
            for name in self.frozen():
                del tensors[name]
        return tensors

    def numbers(self) -> Numbers:
        """Return the scalars of all stages.

        This synchronizes once per device and type instead of once per scalar.
        """
        numbers: Numbers = {}
        stacks: dict[tuple[torch.device, torch.dtype], dict[str, torch.Tensor]] = defaultdict(dict)
        for name, _, value in self._entries():
            if not isinstance(value, torch.Tensor):
                numbers[name] = value
            elif _is_scalar(value):
                stacks[value.device, value.dtype][name] = value
        for stack in stacks.values():
            values = torch.stack(list(stack.values())).tolist()
            numbers |= zip(stack, values, strict=True)
        return self.of_all_stages(numbers)

    def set_numbers(self, numbers: Numbers) -> None:
        """Set this rank's scalars that are in `numbers`."""
        for name, state, value in self._entries():
            if name not in numbers:
                continue
            if isinstance(value, torch.Tensor):
                value.fill_(numbers[name])
            else:
                state[name.rpartition(".")[2]] = numbers[name]

    def _entries(self) -> Iterator[tuple[str, dict[str, Any], Any]]:
        """Yield name, containing dict and value of all optimizer state.

        Missing state, of parameters that had no gradient yet, is created as zeros.
        """
        assert self._optimizer is not None
        for number, group in enumerate(self._optimizer.param_groups):
            for parameter in group["params"]:
                state = self._optimizer.state[parameter]
                if not state:
                    template = self._template(number, group, parameter)
                    state |= {key: _zeros(value, parameter) for key, value in template.items()}
                for key, value in state.items():
                    if value is not None:
                        name = f"optimizer.{self._names[parameter]}.{key}"
                        _check(name, value, parameter.shape)
                        yield name, state, value

    def _template(
        self, number: int, group: dict[str, Any], parameter: torch.Tensor
    ) -> dict[str, Any]:
        """Return the state of a parameter of this kind in parameter group `number`."""
        assert self._optimizer is not None
        kind = (number, parameter.dim(), parameter.dtype, parameter.device)
        if kind not in self._templates:
            self._templates[kind] = _state_after_a_step(self._optimizer, group, parameter)
        return self._templates[kind]


def _state_after_a_step(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor
) -> dict[str, Any]:
    """Return an optimizer's state for a parameter of this kind, from a step on a small probe.

    A step of the real optimizer with zero gradients would need memory for all of them, run its
    hooks and collectives, and be repeated at each save if the optimizer keeps no state.
    """
    trial = copy.copy(optimizer)  # like pickle, this does not copy hooks
    for name, value in vars(optimizer).items():
        vars(trial).setdefault(name, value)
    sizes = (2,) * parameter.dim()
    probe = nn.Parameter(torch.zeros(sizes, dtype=parameter.dtype, device=parameter.device))
    probe.grad = torch.zeros_like(probe)
    probe_group = {**group, "params": [probe]}
    probe_group.pop("param_names", None)  # the probe is not a parameter of the model
    trial.state = defaultdict(dict)
    trial.param_groups = [probe_group]
    trial.step()
    for key, value in trial.state[probe].items():
        _check(f"{type(optimizer).__name__}: {key}", value, probe.shape)
    return dict(trial.state[probe])


def _zeros(example: Any, parameter: torch.Tensor) -> Any:
    if example is None:
        return None
    if not isinstance(example, torch.Tensor):
        return type(example)()
    if example.dim() == 0:
        return torch.zeros_like(example)
    return torch.zeros_like(parameter, dtype=example.dtype, requires_grad=False)


def _is_scalar(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() == 0 and not isinstance(value, DTensor)
    return True


def _check(name: str, value: Any, shape: torch.Size) -> None:
    """Raise unless an optimizer's value is a tensor of its parameter's shape, or one number."""
    if isinstance(value, torch.Tensor):
        if value.shape in (shape, ()):
            return
        shown = f"a tensor of shape {list(value.shape)}"
    else:
        if value is None or isinstance(value, float | int):
            return
        shown = repr(value)
    raise UserError(
        f"{name} is {shown} for a parameter of shape {list(shape)}: checkpoints hold tensors of "
        "the parameter's shape, and single numbers"
    )
