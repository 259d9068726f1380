"""Compute in mixed_precision_param with the parameters that FSDP2 does not gather, and so not cast.

These are all parameters where nothing is sharded, replicated or offloaded, those of
parallelism.fsdp_keep_whole, and experts that one rank has alone. They keep their type, and get
gradients in it.
"""

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from titanlite.parallel import fsdp
from titanlite.parallel.build import Context, shared_names
from titanlite.parallel.expert_parallel import expert_modules, units
from titanlite.parallel.param_view import forward_with_converted_params


def apply(model: nn.Module, context: Context) -> list[str]:
    """Cast these parameters where a unit that is recomputed or compiled as a whole begins."""
    name = context.job.config.training.mixed_precision_param
    dtype = getattr(torch, name)
    left: set[torch.Tensor] = {
        parameter for parameter in fsdp.left_whole(model, context) if parameter.dtype != dtype
    }
    if not left:
        return []
    if not shared_names(model):
        for module in model.modules():
            # Not under tensor parallel, which sums rows over ranks, in the type of activations.
            if not isinstance(module, nn.Embedding) or isinstance(module.weight, DTensor):
                continue
            if module.weight in left:
                left.remove(module.weight)
                _cast_rows(module, dtype)
    for module in _units(model, context):
        names = [path for path, parameter in module.named_parameters() if parameter in left]
        left.difference_update(module.parameters())
        if names:
            forward_with_converted_params(lambda parameter: parameter.to(dtype), module, names)
    if fsdp.is_needed(context.job):
        return []
    return [f"Applied {name} to parameters where they are used"]


def _units(model: nn.Module, context: Context) -> Iterator[nn.Module]:
    """Yield the modules that are recomputed or compiled as a whole, then what is around them.

    A recomputed one runs again without its parents, whose view it would not have. The whole model
    comes last: it casts its head once, in however many chunks the loss is computed.
    """
    experts = {*expert_modules(model, context.table).values()}
    for block in context.blocks(model).values():
        yield from units(block, experts)
        yield from reversed([*block.modules()])  # experts, routers, and what is around them
    yield model


def _cast_rows(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the rows that an embedding looks up, instead of its table."""
    look_up = module.forward

    def forward(tokens: torch.Tensor) -> torch.Tensor:
        return look_up(tokens).to(dtype)

    module.forward = forward  # type: ignore[method-assign]
