"""A module that computes with something made of its parameters; the parameters and their names stay as they are."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.func import functional_call


def forward_with_converted_params(
    convert: Callable[[torch.Tensor], torch.Tensor], module: nn.Module, names: Iterable[str]
) -> None:
    """Replace a module's forward method by one that sees convert(parameter) for its own parameters in `names`."""
    original, names = _Forward(module), tuple(names)

    def forward(*args: Any, **kwargs: Any) -> Any:
        converted = {f"module.{name}": convert(getattr(module, name)) for name in names}
        return functional_call(original, converted, args, kwargs)

    module.forward = forward  # type: ignore[method-assign]


class _Forward(nn.Module):
    """A module's forward method as a module: functional_call takes one, and would run the hooks of the real one."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.original = module, module.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.original(*args, **kwargs)
