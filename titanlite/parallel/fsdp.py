"""FSDP2: which modules share an all-gather, in which precision, and that gradients are summed, not averaged."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from titanlite.config.check import Job
from titanlite.parallel.mesh import Mesh
from titanlite.registry import ModelSpec


def does_something(job: Job) -> bool:
    """Sharding over one rank is worth its cost only where it casts parameters."""
    training = job.config.training
    return job.layout.fsdp > 1 or training.mixed_precision_param != training.dtype


def shard(model: nn.Module, job: Job, mesh: Mesh, tied: bool) -> None:
    """Apply FSDP2 to the embedding, to each block, to norm and output, then to the root."""
    training = job.config.training
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, training.mixed_precision_param),
        reduce_dtype=getattr(torch, training.mixed_precision_reduce),
        cast_forward_inputs=False,  # it would cast the rotary tables too; hidden states have the type already
    )
    for modules, is_last in groups(model, job.spec, tied):
        fully_shard(
            modules,
            mesh=mesh.fsdp,
            mp_policy=policy,
            reshard_after_forward=_reshard(job.config.parallelism.fsdp_reshard_after_forward, is_last),
        )
    fully_shard(model, mesh=mesh.fsdp, mp_policy=policy, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The loss is divided by the valid tokens of all ranks, so gradients are summed; gloo can't scale
            # while it reduces, hence the plain sum.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def groups(model: nn.Module, spec: ModelSpec, tied: bool) -> list[tuple[list[nn.Module], bool]]:
    """Modules that are gathered together, in the order of the forward pass, and whether a group is the last.

    A tied embedding and output are one group: two would each hold a shard of the same weight.
    """
    before = [model.get_submodule(name) for name in spec.before]
    after = [model.get_submodule(name) for name in spec.after]
    blocks = [([block], False) for block in model.get_submodule(spec.blocks).children()]
    if tied:
        return [*blocks, ([*before, *after], True)]
    return [(before, False), *blocks, (after, True)]


def _reshard(policy: str | int, is_last: bool) -> bool | int:
    """The last group is needed again at once in the backward pass, so the default keeps it."""
    if policy == "default":
        return not is_last
    return policy == "always" if isinstance(policy, str) else policy
