"""FSDP2 and HSDP: which modules share an all-gather, in which precision, and that gradients are summed, not averaged.

Replication alone ("DDP") is HSDP with a shard degree of 1: the same path, the same numbers.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

# What set_custom_all_gather, which is public, replaces is private in torch 2.11 to 2.13 (tried on both).
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

from titanlite.config.job import Job
from titanlite.config.schema import Training
from titanlite.layout import Layout
from titanlite.parallel import fsdp_schedule
from titanlite.parallel.mesh import Mesh


def does_something(layout: Layout, training: Training) -> bool:
    """Return whether FSDP2 has anything to do: on one rank only to cast parameters or to fetch them from the host."""
    casts = training.mixed_precision_param != training.dtype
    return layout.fsdp * layout.dp_replicate > 1 or casts or training.enable_cpu_offload


def shard(model: nn.Module, job: Job, mesh: Mesh, kept: list[nn.Parameter], tied: bool) -> None:
    """Apply FSDP2 to each group of modules, then to the root, and set the order of their all-gathers.

    Parameters in `kept` are left as they are.
    """
    training, policy = job.config.training, job.config.parallelism.fsdp_reshard_after_forward
    precision = MixedPrecisionPolicy(
        param_dtype=getattr(torch, training.mixed_precision_param),
        reduce_dtype=getattr(torch, training.mixed_precision_reduce),
        cast_forward_inputs=False,  # it would cast the rotary tables too; hidden states have the type already
    )
    offload = OffloadPolicy()
    if training.enable_cpu_offload:  # page-locked memory exists only beside an accelerator
        offload = CPUOffloadPolicy(pin_memory=mesh.world.device_type != "cpu")
    apply = partial(
        fully_shard, mesh=mesh.fsdp, mp_policy=precision, offload_policy=offload, ignored_params=set(kept)
    )
    groups = [[model.get_submodule(name) for name in names] for names in fsdp_schedule.group_names(job, tied)]
    output = fsdp_schedule.group_with_output(job, tied)
    if fsdp_schedule.head_in_root(job):
        groups[output] = [model]
    for number, modules in reversed([*enumerate(groups)]):  # the root's comes last: it takes what is left
        # The group with the output is needed again at once in the backward pass, so the default keeps it.
        reshard = number != output if policy == "default" else policy
        apply(modules, reshard_after_forward=reshard == "always" if isinstance(reshard, str) else reshard)
    if not fsdp_schedule.head_in_root(job):
        apply(model, reshard_after_forward=False)
    in_float8 = job.config.quantize.linear.float8.enable_fsdp_float8_all_gather
    as_bytes = in_float8 and mesh.world.device_type == "cpu"
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The loss is divided by the valid tokens of all ranks, so gradients are summed; gloo can't scale
            # while it reduces, hence the plain sum.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if as_bytes:
                module.set_custom_all_gather(BytesAllGather())
    fsdp_schedule.apply([modules[0] for modules in groups], fsdp_schedule.schedule(job, tied))


class BytesAllGather(DefaultAllGather):
    """gloo can't carry float8, which a group of nothing else is gathered in."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        return super().__call__(output_tensor.view(torch.uint8), input_tensor.view(torch.uint8), group, async_op)
