"""Weights in a folder's own names and forms, by the library's own conversion."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from titanlite.errors import UserError, some_of
from titanlite.models.transformers.model import on_meta
from titanlite.registry import Conversion


@dataclass(eq=False)
class Reverted(Conversion):
    """A parameter that the library renames, cuts or turns when it saves."""

    model: Any
    name: str
    shape: tuple[int, ...]
    names: tuple[str, ...]
    last: tuple[Tensor, dict[str, Tensor]] | None = None
    """The last weight, whose tensors are taken one by one."""

    def to_hf(self, weight: Tensor, name: str) -> Tensor:
        if self.last is None or self.last[0] is not weight:
            self.last = weight, revert_weight_conversion(self.model, {self.name: weight})
        tensor = self.last[1][name]
        if name == self.names[-1]:
            self.last = None
        return tensor

    def from_hf(self, read: Callable[[str], Tensor]) -> Tensor:
        """Return the weight; where its elements come from is found by their numbers' way there."""
        size = torch.Size(self.shape).numel()
        numbers = torch.arange(size).view(self.shape)
        parts = revert_weight_conversion(self.model, {self.name: numbers})
        weight: Tensor | None = None
        for name, places in parts.items():
            part = read(name)
            if weight is None:
                weight = torch.empty(size, dtype=part.dtype)
            weight[places.flatten()] = part.flatten()
        assert weight is not None
        return weight.view(self.shape)


def conversions(values: str) -> dict[str, Conversion]:
    """Return the parameters that a folder has otherwise, by name."""
    model = on_meta(json.loads(values))
    buffers = dict(model.named_buffers())
    own = {name: parameter.detach() for name, parameter in model.named_parameters()}
    own |= {name: each for name, each in model.state_dict().items() if name in buffers}
    saved = revert_weight_conversion(model, own)
    if saved.keys() == own.keys() and all(saved[name] is own[name] for name in own):
        return {}
    found: dict[str, Conversion] = {}
    together, several = set[str](), set[str]()
    for name, weight in own.items():
        alone = revert_weight_conversion(model, {name: weight})
        several |= together & alone.keys()
        together |= alone.keys()
        if [*alone] != [name] or alone[name] is not weight:
            found[name] = Reverted(model, name, tuple(weight.shape), tuple(alone))
    if unknown := sorted(saved.keys() ^ together | several):
        raise UserError(
            f"{type(model).__name__} saves tensors that are made of several parameters:"
            f"{some_of(unknown)}\nPlain files: titanlite checkpoint export --format safetensors"
        )
    return found
