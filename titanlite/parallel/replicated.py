"""Parameters that stay whole on every data-parallel rank (parallelism.fsdp_keep_whole).

FSDP2 leaves them alone, so nothing gathers them; here is what it would have done besides: computing with them in
mixed_precision_param, and summing their gradients over the ranks, all in one collective a step.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from titanlite.parallel.dtensor import local_part
from titanlite.parallel.param_view import forward_with_converted_params


def compute_in(dtype: torch.dtype, model: nn.Module, kept: Iterable[nn.Parameter]) -> None:
    """Let the modules that own these parameters compute with them in `dtype`; names and masters stay as they are."""
    wanted = {id(parameter) for parameter in kept if parameter.dtype != dtype}
    for module in model.modules():
        own = [name for name, parameter in module.named_parameters(recurse=False) if id(parameter) in wanted]
        if own:
            forward_with_converted_params(lambda parameter: parameter.to(dtype), module, own)


def sum_gradients(kept: Iterable[nn.Parameter], group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    """Sum the gradients over the data-parallel ranks, in `dtype`."""
    trained = [parameter for parameter in kept if parameter.requires_grad]
    if not trained:
        return
    for parameter in trained:
        if parameter.grad is None:  # this rank's tokens never met it; others' may have
            parameter.grad = torch.zeros_like(parameter)
    gradients = [local_part(parameter.grad) for parameter in trained if parameter.grad is not None]
    flat = torch.cat([gradient.flatten().to(dtype) for gradient in gradients])
    dist.all_reduce(flat, group=group)
    for gradient, summed in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(summed.view_as(gradient))
