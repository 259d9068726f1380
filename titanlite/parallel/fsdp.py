"""FSDP2 and HSDP: which modules share an all-gather, in which precision, and how gradients are
summed.

Where nothing is sharded FSDP2 is not used: cast.py casts the parameters, and replicated.py sums
the gradients of replicas ("DDP").
"""

from collections.abc import Collection, Sequence
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard

from titanlite.config.job import Job
from titanlite.config.parallel_schema import Parallelism
from titanlite.errors import UserError
from titanlite.parallel import fsdp_schedule, replicated
from titanlite.parallel.build import Context, shared_names
from titanlite.parallel.dtensor import local_part
from titanlite.parallel.expert_parallel import expert_modules
from titanlite.parallel.float8 import bytes_all_gather
from titanlite.runtime import torch_private


def apply(model: nn.Module, context: Context) -> list[str]:
    """Apply FSDP2 to each group of modules in the part, then to its root; set the prefetch
    schedule.
    """
    job = context.job
    if not is_needed(job):
        if job.layout.dp_replicate > 1:
            return [_note(job)]
        return []
    if context.device.type == "cuda":
        check_keys(job.config.parallelism)
    modules = dict(model.named_modules())
    plan = fsdp_schedule.schedule(job, tied=bool(shared_names(model)), modules=modules)
    groups: list[list[nn.Module]] = []
    for names in plan.groups:
        groups.append([modules[name] for name in names])
    if plan.last_is_root:
        groups[plan.last] = [model]
    experts: set[nn.Module] = set()
    if not fsdp_schedule.experts_are_whole(job):
        experts = {*expert_modules(model, context.table).values()}
    with torch_private.share_reshard_meshes():
        _shard(model, context, groups, plan, experts)
    _sum_gradients(model, context, experts)
    if context.device.type == "cuda" and job.config.parallelism.fsdp_separate_reduce_scatter_group:
        assert isinstance(model, FSDPModule)
        model.set_separate_reduce_scatter_group()
    if context.mesh.experts:
        for module in experts:
            module.register_forward_pre_hook(_gather_for_backward, prepend=True)
    fsdp_schedule.set_prefetch([group[0] for group in groups], plan)
    return [*replicated.note(context), _note(job)]


def is_needed(job: Job) -> bool:
    """Return whether any parameter is sharded or offloaded."""
    return job.layout.max_shard_degree > 1 or job.config.training.enable_cpu_offload


def left_whole(model: nn.Module, context: Context) -> list[nn.Parameter]:
    """Return the parameters of a model part that FSDP2 does not take, and so does not cast."""
    if not is_needed(context.job):
        return [*model.parameters()]
    whole = replicated.replicated_parameters(model, context)
    if fsdp_schedule.experts_are_whole(context.job):
        for module in expert_modules(model, context.table).values():
            whole += module.parameters()
    return whole


def not_summed(model: nn.Module, context: Context) -> list[nn.Parameter]:
    """Return the parameters of a model part that FSDP2 does not sum over data-parallel ranks."""
    if is_needed(context.job):
        return replicated.replicated_parameters(model, context)
    if context.job.layout.dp_replicate > 1:
        return [*model.parameters()]
    return []


def _shard(
    model: nn.Module,
    context: Context,
    groups: Sequence[list[nn.Module]],
    plan: fsdp_schedule.PrefetchSchedule,
    experts: Collection[nn.Module],
) -> None:
    """Apply FSDP2 to each group, and to the root."""
    training = context.job.config.training
    precision = MixedPrecisionPolicy(
        param_dtype=getattr(torch, training.mixed_precision_param),
        reduce_dtype=getattr(torch, training.mixed_precision_reduce),
        # Casting would change the rotary tables too; hidden states already have the right type.
        cast_forward_inputs=False,
    )
    offload = OffloadPolicy()
    if training.enable_cpu_offload:
        # Page-locked memory needs an accelerator.
        offload = CPUOffloadPolicy(pin_memory=context.device.type != "cpu")
    shard = partial(
        fully_shard,
        mp_policy=precision,
        offload_policy=offload,
        ignored_params=set(left_whole(model, context)),
    )
    weights: set[nn.Parameter] = set()
    for module in experts:
        weights.update(module.parameters())
    # Inner modules before outer ones: experts before their block. A root group is number 0, so it
    # comes last and takes all the rest.
    for number in reversed(range(len(groups))):
        modules = groups[number]
        mesh = _mesh_of(modules[0], context, experts)
        shard(
            modules,
            mesh=mesh,
            reshard_after_forward=_reshard(context.job, is_last=number == plan.last),
            shard_placement_fn=partial(_dimension_of_experts, weights, mesh.mesh.size(-1), context),
        )
    if not plan.last_is_root:
        shard(model, mesh=context.mesh.fsdp, reshard_after_forward=False)


def _mesh_of(module: nn.Module, context: Context, experts: Collection[nn.Module]) -> DeviceMesh:
    """Return the ranks that shard a module's parameters."""
    if context.mesh.experts and module in experts:
        return context.mesh.experts
    return context.mesh.fsdp


def _reshard(job: Job, is_last: bool) -> bool | int:
    """Return the value of FSDP2's reshard_after_forward."""
    policy = job.config.parallelism.fsdp_reshard_after_forward
    if isinstance(policy, int):
        return policy
    if policy == "default":
        # The backward pass needs the last group right away, so it stays gathered. Under pipeline
        # parallel all groups stay, since the next micro-batch needs them.
        return not is_last and job.layout.pp == 1
    return policy == "always"


def _sum_gradients(model: nn.Module, context: Context, experts: Collection[nn.Module]) -> None:
    """Let FSDP2 sum gradients, not average them: the loss is divided by the global valid tokens."""
    float8 = context.job.config.quantize.linear.float8
    as_bytes = context.device.type == "cpu" and float8.enable_fsdp_float8_all_gather
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        # A single rank needs no sum; FSDP2 would add a kernel for the factor.
        if _mesh_of(module, context, experts).size() > 1:
            module.set_gradient_divide_factor(1.0)
            # gloo can't scale while it reduces.
            module.set_force_sum_reduction_for_comms(True)
        if as_bytes:
            module.set_custom_all_gather(bytes_all_gather())
        if context.device.type == "cuda" and context.job.config.parallelism.enable_fsdp_symm_mem:
            module.set_symm_mem_for_comm()  # which reduces, too, if gradients are summed


_METHODS = {
    "fsdp_separate_reduce_scatter_group": "set_separate_reduce_scatter_group",
    "enable_fsdp_symm_mem": "set_symm_mem_for_comm",
}
"""Keys, and FSDP2's methods for them, which torch has from 2.14 on."""


def check_keys(settings: Parallelism) -> None:
    """Raise a UserError if a key needs a later torch."""
    for key, method in _METHODS.items():
        if getattr(settings, key) and not hasattr(FSDPModule, method):
            raise UserError(
                f"parallelism.{key} needs torch 2.14; this is torch {torch.__version__}"
            )


def _gather_for_backward(module: nn.Module, args: object) -> None:
    """Gather experts for their backward pass when their block is recomputed, and keep them.

    Otherwise FSDP2 would mistake it for another forward pass: prefetch the next groups, free the
    experts, and gather them again.
    """
    if torch_private.is_recomputing():
        torch_private.begin_backward(module)


def _dimension_of_experts(
    weights: Collection[nn.Parameter], ranks: int, context: Context, parameter: nn.Parameter
) -> Shard | None:
    """Return the dimension in which an expert's weight is sharded; None for other weights.

    FSDP2 pads only dimension 0.
    """
    if parameter not in weights:
        return None
    experts, rows = local_part(parameter).shape[:2]
    if experts % ranks == 0:
        return Shard(0)
    if rows % ranks == 0:
        return Shard(1)
    if not context.mesh.experts:
        return Shard(0)
    raise UserError(
        f"parallelism.expert_parallel_degree = {context.job.layout.ep}: {ranks} ranks shard an "
        f"expert (data_parallel_shard x context x tensor / expert parallel), but {ranks} divides "
        f"neither the {experts} experts of a rank nor the {rows} rows of each"
    )


def _note(job: Job) -> str:
    """Describe the sharding for the log."""
    layout = job.layout
    training = job.config.training
    name = "FSDP on 1 rank"
    if layout.fsdp > 1:
        name = f"FSDP on {layout.fsdp} ranks"
    if layout.dp_replicate > 1:
        name = f"data parallel with {layout.dp_replicate} replicas"
        if layout.fsdp > 1:
            name += f", each sharded over {layout.fsdp} ranks (HSDP)"
    if layout.sums_experts_apart:
        name += f", experts on {layout.expert_fsdp}"
    note = f"Applied {name}, parameters in {training.mixed_precision_param}"
    note += f", gradients summed in {training.mixed_precision_reduce}"
    settings = job.config.parallelism
    if settings.fsdp_forward_prefetch:
        note += f", forward prefetch {settings.fsdp_forward_prefetch}"
    if settings.fsdp_backward_prefetch:
        note += f", backward prefetch {settings.fsdp_backward_prefetch}"
    if training.enable_cpu_offload:
        note += ", offloaded to host memory"
    return note
