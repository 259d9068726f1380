"""Parameters that stay whole on every data-parallel rank (parallelism.fsdp_keep_whole).

FSDP2 ignores them; this module replaces its work for them: computing in mixed_precision_param, and
summing their gradients over the ranks, in one collective a step.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from titanlite.errors import UserError
from titanlite.parallel.build import Context, match_parameters, named_parameters
from titanlite.parallel.dtensor import local_part
from titanlite.parallel.param_view import forward_with_converted_params

KEY = "parallelism.fsdp_keep_whole"


def apply(model: nn.Module, context: Context) -> list[str]:
    """Let modules compute with their replicated parameters in mixed_precision_param.

    The parameters themselves keep their type.
    """
    patterns = context.job.config.parallelism.fsdp_keep_whole
    names = match_parameters(context.table, KEY, patterns)
    if len(names) == len(context.table):
        raise UserError(f"{KEY} matches every parameter: replicate instead of sharding")
    experts = [name for name in names if context.table[name].tensor == "expert"]
    if experts and context.mesh.experts:  # which have other ranks to sum over
        why = "experts are always sharded with expert or tensor parallel; name the other parameters"
        raise UserError(f"{KEY} matches {experts[0]}: {why}")
    dtype = getattr(torch, context.job.config.training.mixed_precision_param)
    replicated = {*replicated_parameters(model, context)}
    for module in model.modules():
        parameters = module.named_parameters(recurse=False)
        own = [name for name, p in parameters if p in replicated and p.dtype != dtype]
        if own:
            forward_with_converted_params(lambda parameter: parameter.to(dtype), module, own)
    if not names:
        return []
    count = f"{len(names)} of {len(context.table)}"
    return [f"Applied {KEY}: {count} parameters are replicated ({', '.join(patterns)})"]


def replicated_parameters(model: nn.Module, context: Context) -> list[nn.Parameter]:
    """Return the parameters of a model part that FSDP2 must ignore and `sum_gradients` must sum."""
    names = match_parameters(context.table, KEY, context.job.config.parallelism.fsdp_keep_whole)
    parameters = dict(named_parameters(model, context.table))
    return [parameters[name] for name in names if name in parameters]


def sum_gradients(
    parameters: Iterable[nn.Parameter], group: dist.ProcessGroup, dtype: torch.dtype
) -> None:
    """Sum the gradients of replicated parameters over the data-parallel ranks, in `dtype`."""
    gradients = []
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:  # unused by this rank's tokens; other ranks sum it
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(local_part(parameter.grad))
    if not gradients:
        return
    flat = torch.cat([gradient.flatten().to(dtype) for gradient in gradients])
    dist.all_reduce(flat, group=group)
    totals = flat.split([gradient.numel() for gradient in gradients])
    for gradient, total in zip(gradients, totals, strict=True):
        gradient.copy_(total.view_as(gradient))
