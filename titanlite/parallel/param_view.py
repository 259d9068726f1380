"""Let a module compute with converted parameters, without changing them or their names."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from titanlite.runtime.torch_private import put_tensor


def forward_with_converted_params(
    convert: Callable[[torch.Tensor], torch.Tensor], module: nn.Module, names: Iterable[str]
) -> None:
    """Let a module's forward method see convert(parameter) for its parameters in `names`.

    functional_call does so where torch compiles: Dynamo refuses to write to a module in what is
    recomputed. Elsewhere it takes several times as long as to write.
    """
    traced = _Forward(module)
    original = module.forward
    places: dict[torch.Tensor, list[tuple[nn.Module, str]]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        path, _, attribute = name.rpartition(".")
        places.setdefault(parameter, []).append((module.get_submodule(path), attribute))
    own = {f"module.{name}": places[module.get_parameter(name)] for name in names}
    is_tied = any(len(shared) > 1 for shared in places.values())

    def forward(*args: Any, **kwargs: Any) -> Any:
        kept = [getattr(owner, attribute) for (owner, attribute), *_ in own.values()]
        if torch.compiler.is_compiling():
            converted = dict(zip(own, map(convert, kept), strict=True))
            return functional_call(traced, converted, args, kwargs, tie_weights=is_tied)
        for shared, parameter in zip(own.values(), kept, strict=True):
            put_tensor(shared, convert(parameter))
        try:
            return original(*args, **kwargs)
        finally:
            for shared, parameter in zip(own.values(), kept, strict=True):
                put_tensor(shared, parameter)

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
