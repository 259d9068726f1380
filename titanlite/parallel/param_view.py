"""Let a module compute with converted parameters, without changing them or their names."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.func import functional_call


def forward_with_converted_params(
    convert: Callable[[torch.Tensor], torch.Tensor], module: nn.Module, names: Iterable[str]
) -> None:
    """Let a module's forward method see convert(parameter) for its parameters in `names`."""
    original = _Forward(module)
    own = []
    for name in names:
        path, _, attribute = name.rpartition(".")
        own.append((f"module.{name}", module.get_submodule(path), attribute))
    # Finding shared parameters at each call takes longer than all else that functional_call does.
    is_tied = len([*module.parameters()]) < len([*module.named_parameters(remove_duplicate=False)])

    def forward(*args: Any, **kwargs: Any) -> Any:
        converted = {name: convert(getattr(owner, attribute)) for name, owner, attribute in own}
        return functional_call(original, converted, args, kwargs, tie_weights=is_tied)

    module.forward = forward  # type: ignore[method-assign]


class _Forward(nn.Module):
    """A module's forward method as a module.

    functional_call takes a module, and would run the real module's hooks.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.original = module.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.original(*args, **kwargs)
