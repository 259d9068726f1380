"""FSDP2 and HSDP: which modules share an all-gather, in which precision, and that gradients are summed, not averaged.

Replication alone ("DDP") is HSDP with a shard degree of 1: the same path, the same numbers.
"""

from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from titanlite.config.job import Job
from titanlite.parallel import fsdp_schedule
from titanlite.parallel.build import Context, shared_names
from titanlite.parallel.float8 import bytes_all_gather
from titanlite.parallel.replicated import replicated_parameters


def apply(model: nn.Module, context: Context) -> list[str]:
    """Apply FSDP2 to each group of modules that the part has, then to its root, and set the prefetch schedule."""
    job, on_cpu = context.job, context.device.type == "cpu"
    training, policy = job.config.training, job.config.parallelism.fsdp_reshard_after_forward
    casts = training.mixed_precision_param != training.dtype
    if job.layout.fsdp * job.layout.dp_replicate == 1 and not casts and not training.enable_cpu_offload:
        return []
    precision = MixedPrecisionPolicy(
        param_dtype=getattr(torch, training.mixed_precision_param),
        reduce_dtype=getattr(torch, training.mixed_precision_reduce),
        cast_forward_inputs=False,  # it would cast the rotary tables too; hidden states have the type already
    )
    # Page-locked memory needs an accelerator.
    offload = CPUOffloadPolicy(pin_memory=not on_cpu) if training.enable_cpu_offload else OffloadPolicy()
    ignored = set(replicated_parameters(model, context))
    shard = partial(
        fully_shard, mesh=context.mesh.fsdp, mp_policy=precision, offload_policy=offload, ignored_params=ignored
    )
    names = {name for name, _ in model.named_modules()}
    plan = fsdp_schedule.schedule(job, tied=bool(shared_names(model)), modules=names)
    groups = [[model.get_submodule(name) for name in group] for group in plan.groups]
    if plan.last_is_root:
        groups[plan.last] = [model]
    for number, modules in reversed([*enumerate(groups)]):  # the root's comes last: it takes what is left
        # The backward pass needs the last group again at once, so the default keeps it gathered; under pipeline
        # parallel it keeps all, which the next micro-batch needs.
        reshard = policy == "always" or (policy == "default" and number != plan.last and job.layout.pp == 1)
        shard(modules, reshard_after_forward=policy if isinstance(policy, int) else reshard)
    if not plan.last_is_root:
        shard(model, reshard_after_forward=False)
    as_bytes = on_cpu and job.config.quantize.linear.float8.enable_fsdp_float8_all_gather
    for module in model.modules():
        if isinstance(module, FSDPModule):
            if context.mesh.fsdp.size() > 1:  # on one rank FSDP2 would divide by this factor, in a pass of its own
                # The loss is divided by the valid tokens of all ranks, so gradients are summed; gloo can't scale
                # while it reduces, hence the plain sum.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
            if as_bytes:
                module.set_custom_all_gather(bytes_all_gather())
    fsdp_schedule.set_prefetch([modules[0] for modules in groups], plan)
    return [_note(job)]


def _note(job: Job) -> str:
    layout, training, settings = job.layout, job.config.training, job.config.parallelism
    name = f"FSDP on {layout.fsdp} rank" + "s" * (layout.fsdp > 1)
    if layout.dp_replicate > 1:
        name = f"data parallel with {layout.dp_replicate} replicas"
        name += f", each sharded over {layout.fsdp} ranks (HSDP)" * (layout.fsdp > 1)
    note = f"Applied {name}, parameters in {training.mixed_precision_param}"
    note += f", gradients summed in {training.mixed_precision_reduce}"
    for direction in ("forward", "backward"):
        if depth := getattr(settings, f"fsdp_{direction}_prefetch"):
            note += f", {direction} prefetch {depth}"
    return note + ", offloaded to host memory" * training.enable_cpu_offload
