"""FSDP2 and HSDP: which modules share an all-gather, in which precision, and that gradients are summed, not averaged.

Replication alone ("DDP") is HSDP with a shard degree of 1: the same path, the same numbers.
"""

from collections.abc import Collection
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from titanlite.config.job import Job
from titanlite.errors import UserError
from titanlite.parallel import fsdp_schedule
from titanlite.parallel.build import Context, shared_names
from titanlite.parallel.dtensor import local_part
from titanlite.parallel.expert import expert_modules
from titanlite.parallel.float8 import bytes_all_gather
from titanlite.parallel.replicated import replicated_parameters
from titanlite.runtime import torch_private


def apply(model: nn.Module, context: Context) -> list[str]:
    """Apply FSDP2 to each group of modules that the part has, then to its root, and set the prefetch schedule."""
    job, on_cpu = context.job, context.device.type == "cpu"
    training, policy = job.config.training, job.config.parallelism.fsdp_reshard_after_forward
    casts = training.mixed_precision_param != training.dtype
    sharded = job.layout.fsdp * job.layout.dp_replicate > 1 or job.layout.experts_apart
    if not (sharded or casts or training.enable_cpu_offload):
        return []
    precision = MixedPrecisionPolicy(
        param_dtype=getattr(torch, training.mixed_precision_param),
        reduce_dtype=getattr(torch, training.mixed_precision_reduce),
        cast_forward_inputs=False,  # it would cast the rotary tables too; hidden states have the type already
    )
    # Page-locked memory needs an accelerator.
    offload = CPUOffloadPolicy(pin_memory=not on_cpu) if training.enable_cpu_offload else OffloadPolicy()
    ignored = set(replicated_parameters(model, context))
    shard = partial(fully_shard, mp_policy=precision, offload_policy=offload, ignored_params=ignored)
    names = {name for name, _ in model.named_modules()}
    plan = fsdp_schedule.schedule(job, tied=bool(shared_names(model)), modules=names)
    groups = [[model.get_submodule(name) for name in group] for group in plan.groups]
    experts = {*expert_modules(model, context.table).values()}
    weights = {weight for module in experts for weight in module.parameters()}

    def mesh_of(module: nn.Module) -> DeviceMesh:
        return context.mesh.experts if context.mesh.experts and module in experts else context.mesh.fsdp

    if plan.last_is_root:
        groups[plan.last] = [model]
    for number, modules in reversed([*enumerate(groups)]):  # the root's comes last: it takes what is left
        # The backward pass needs the last group again at once, so the default keeps it gathered; under pipeline
        # parallel it keeps all, which the next micro-batch needs.
        reshard = policy == "always" or (policy == "default" and number != plan.last and job.layout.pp == 1)
        mesh = mesh_of(modules[0])
        place = partial(_dimension_of_experts, weights, mesh.mesh.size(-1), context)
        how = policy if isinstance(policy, int) else reshard
        shard(modules, mesh=mesh, reshard_after_forward=how, shard_placement_fn=place)
    if not plan.last_is_root:
        shard(model, mesh=context.mesh.fsdp, reshard_after_forward=False)
    as_bytes = on_cpu and job.config.quantize.linear.float8.enable_fsdp_float8_all_gather
    for module in model.modules():
        if isinstance(module, FSDPModule):
            if mesh_of(module).size() > 1:  # on one rank FSDP2 would divide by this factor, in a pass of its own
                # The loss is divided by the valid tokens of all ranks, so gradients are summed; gloo can't scale
                # while it reduces, hence the plain sum.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
            if as_bytes:
                module.set_custom_all_gather(bytes_all_gather())
    for module in experts if context.mesh.experts else ():
        module.register_forward_pre_hook(_gather_for_backward, prepend=True)
    fsdp_schedule.set_prefetch([modules[0] for modules in groups], plan)
    return [_note(job)]


def _gather_for_backward(module: nn.Module, args: object) -> None:
    """Gather experts for their backward pass when their block is recomputed, and keep them.

    Else FSDP2 would take it for another forward pass: gather what follows ahead, and free and gather them again.
    """
    if torch_private.is_recomputing():
        torch_private.begin_backward(module)


def _dimension_of_experts(
    weights: Collection[nn.Parameter], ranks: int, context: Context, parameter: nn.Parameter
) -> Shard | None:
    """Return on which dimension an expert weight is sharded: FSDP2 pads dimension 0 alone; None for other weights."""
    if parameter not in weights:
        return None
    experts, rows = local_part(parameter).shape[:2]
    if experts % ranks and rows % ranks and context.mesh.experts:
        ranks_of = f"{ranks} ranks shard an expert (data_parallel_shard x context x tensor / expert parallel)"
        neither = f"{ranks} divides neither the {experts} experts of a rank nor the {rows} rows of each"
        raise UserError(f"parallelism.expert_parallel_degree = {context.job.layout.ep}: {ranks_of}, but {neither}")
    return Shard(1) if experts % ranks and rows % ranks == 0 else Shard(0)


def _note(job: Job) -> str:
    layout, training, settings = job.layout, job.config.training, job.config.parallelism
    name = f"FSDP on {layout.fsdp} rank" + "s" * (layout.fsdp > 1)
    if layout.dp_replicate > 1:
        name = f"data parallel with {layout.dp_replicate} replicas"
        name += f", each sharded over {layout.fsdp} ranks (HSDP)" * (layout.fsdp > 1)
    name += f", experts on {layout.efsdp}" * layout.experts_apart
    note = f"Applied {name}, parameters in {training.mixed_precision_param}"
    note += f", gradients summed in {training.mixed_precision_reduce}"
    for direction in ("forward", "backward"):
        if depth := getattr(settings, f"fsdp_{direction}_prefetch"):
            note += f", {direction} prefetch {depth}"
    return note + ", offloaded to host memory" * training.enable_cpu_offload
