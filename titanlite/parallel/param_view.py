"""Let a module compute with converted parameters, without changing them or their names."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from titanlite.runtime.torch_private import put_tensor


def forward_with_converted_params(
    convert: Callable[[torch.Tensor], torch.Tensor], module: nn.Module, names: Iterable[str]
) -> None:
    """Let a module's forward method see convert(parameter) for its parameters in `names`.

    torch.func.functional_call does this too, and takes several times as long.
    """
    original = module.forward
    places: dict[torch.Tensor, list[tuple[nn.Module, str]]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        path, _, attribute = name.rpartition(".")
        places.setdefault(parameter, []).append((module.get_submodule(path), attribute))
    own = [places[module.get_parameter(name)] for name in names]

    def forward(*args: Any, **kwargs: Any) -> Any:
        kept = [getattr(owner, attribute) for (owner, attribute), *_ in own]
        for shared, parameter in zip(own, kept, strict=True):
            put_tensor(shared, convert(parameter))
        try:
            return original(*args, **kwargs)
        finally:
            for shared, parameter in zip(own, kept, strict=True):
                put_tensor(shared, parameter)

    module.forward = forward  # type: ignore[method-assign]
