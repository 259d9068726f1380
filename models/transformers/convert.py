"""Weights in the names and forms of a Hugging Face folder, through the library's conversion."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from titanlite.errors import UserError, some_of
from titanlite.models.transformers.model import on_meta
from titanlite.registry import Conversion


@dataclass(eq=False)
class Reverted(Conversion):
    """Parameters that the library renames, splits, joins or transposes when it saves."""

    model: Any
    parameters: tuple[str, ...]
    shapes: dict[str, torch.Size]
    names: tuple[str, ...]
    last: tuple[Tensor, dict[str, Tensor]] | None = None
    """The last weight and its tensors, which are requested one by one."""

    def to_hf(self, weights: Sequence[Tensor], name: str) -> Tensor:
        if self.last is None or self.last[0] is not weights[0]:
            own = dict(zip(self.shapes, weights, strict=True))
            self.last = weights[0], revert_weight_conversion(self.model, own)
        tensor = self.last[1][name]
        if name == self.names[-1]:
            self.last = None
        return tensor

    def from_hf(self, parameter: str, read: Callable[[str], Tensor]) -> Tensor:
        """Return the weight; converting its elements' numbers shows where each comes from."""
        numbers = {}
        end = 0
        for name, shape in self.shapes.items():
            start = end
            end += shape.numel()
            numbers[name] = torch.arange(start, end).view(shape)
        first = int(numbers[parameter].min())
        size = numbers[parameter].numel()
        weight: Tensor | None = None
        for name, places in revert_weight_conversion(self.model, numbers).items():
            part = read(name)
            if weight is None:
                weight = torch.empty(size, dtype=part.dtype)
            own = (places >= first) & (places < first + size)
            weight[places[own] - first] = part[own]
        assert weight is not None
        return weight.view(self.shapes[parameter])


def conversions(values: str) -> dict[str, Conversion]:
    """Return the parameters that a folder stores in another form, by name."""
    model = on_meta(json.loads(values))
    buffers = dict(model.named_buffers())
    own = {name: parameter.detach() for name, parameter in model.named_parameters()}
    own |= {name: each for name, each in model.state_dict().items() if name in buffers}
    saved = revert_weight_conversion(model, own)
    if saved.keys() == own.keys() and all(saved[name] is own[name] for name in own):
        return {}
    kept: list[str] = []
    groups: dict[tuple[str, ...], dict[str, torch.Size]] = {}
    for name, weight in own.items():
        alone = revert_weight_conversion(model, {name: weight})
        if [*alone] == [name] and alone[name] is weight:
            kept.append(name)
        else:
            groups.setdefault((*alone,), {})[name] = weight.shape
    times = Counter([*kept, *chain(*groups)])
    unknown = sorted(saved.keys() ^ times.keys() | {n for n in times if times[n] > 1})
    if unknown:
        raise UserError(
            f"{type(model).__name__} saves tensors that combine parameters in an unknown way:"
            f"{some_of(unknown)}\nPlain files: titanlite checkpoint export --format safetensors"
        )
    found = []
    for names, shapes in groups.items():
        found.append(Reverted(model, (*shapes,), shapes, names))
    by_name = {}
    for each in found:
        by_name |= dict.fromkeys(each.parameters, each)
    return by_name
