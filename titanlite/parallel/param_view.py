"""Let a module compute with converted parameters, without changing them or their names."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, distribute_tensor
from torch.func import functional_call

from titanlite.runtime.torch_private import put_tensor


def forward_with_converted_params(
    convert: Callable[[torch.Tensor], torch.Tensor], module: nn.Module, names: Iterable[str]
) -> None:
    """Let a module's forward method see convert(parameter) for its parameters in `names`.

    functional_call does so where torch compiles: Dynamo refuses to write to a module in what is
    recomputed. Elsewhere it takes several times as long as to write.
    """
    original = module.forward
    traced = nn.Module()  # functional_call would run the real module's hooks
    traced.module = module
    traced.forward = original  # type: ignore[method-assign]
    owners: dict[torch.Tensor, list[tuple[nn.Module, str]]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        path, _, attribute = name.rpartition(".")
        owners.setdefault(parameter, []).append((module.get_submodule(path), attribute))
    own = {f"module.{name}": owners[module.get_parameter(name)] for name in names}

    def forward(*args: Any, **kwargs: Any) -> Any:
        kept = [getattr(owner, attribute) for (owner, attribute), *_ in own.values()]
        if torch.compiler.is_compiling():
            converted = dict(zip(own, map(convert, kept), strict=True))
            return functional_call(traced, converted, args, kwargs)
        for shared, parameter in zip(own.values(), kept, strict=True):
            put_tensor(shared, convert(parameter))
        try:
            return original(*args, **kwargs)
        finally:
            for shared, parameter in zip(own.values(), kept, strict=True):
                put_tensor(shared, parameter)

    module.forward = forward  # type: ignore[method-assign]


def split_parameters(
    module: nn.Module,
    mesh: DeviceMesh,
    placement: Placement,
    local: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Place a module's own parameters on a mesh; its forward method sees local(parameter)."""
    own = dict(module.named_parameters(recurse=False))
    for name, parameter in own.items():
        placed = distribute_tensor(parameter.detach(), mesh, (placement,))
        module.register_parameter(name, nn.Parameter(placed, parameter.requires_grad))
    forward_with_converted_params(local, module, own)
