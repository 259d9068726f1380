"""Parameters that stay whole on every data-parallel rank (parallelism.fsdp_keep_whole).

FSDP2 ignores them; this module sums their gradients over the ranks, in one collective a step.
"""

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import nn

from titanlite.config.job import Job
from titanlite.errors import UserError
from titanlite.parallel.build import Context, match_parameters, named_parameters
from titanlite.parallel.dtensor import local_part
from titanlite.registry import Rule

KEY = "parallelism.fsdp_keep_whole"


def note(context: Context) -> list[str]:
    """Return a line on how many parameters the patterns match, if there are any."""
    patterns = context.job.config.parallelism.fsdp_keep_whole
    names = kept_whole(context.job, context.table)
    if not names:
        return []
    count = f"{len(names)} of {len(context.table)}"
    return [f"Applied {KEY}: {count} parameters are replicated ({', '.join(patterns)})"]


def kept_whole(job: Job, table: Mapping[str, Rule]) -> list[str]:
    """Return the parameters that stay whole; raise a UserError if one cannot."""
    names = match_parameters(table, KEY, job.config.parallelism.fsdp_keep_whole)
    if len(names) == len(table):
        raise UserError(f"{KEY} matches every parameter: replicate instead of sharding")
    experts = [name for name in names if table[name].tensor == "expert"]
    if experts and job.layout.experts_on_own_mesh:  # their gradients are summed over other ranks
        why = "experts are always sharded with expert or tensor parallel; name the other parameters"
        raise UserError(f"{KEY} matches {experts[0]}: {why}")
    return names


def replicated_parameters(model: nn.Module, context: Context) -> list[nn.Parameter]:
    """Return the parameters of a model part that FSDP2 must ignore and `sum_gradients` must sum."""
    names = kept_whole(context.job, context.table)
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
