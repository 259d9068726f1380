"""The order in which techniques are applied, for every model."""

from collections.abc import Callable
from functools import partial

from torch import nn

from titanlite.parallel import (
    cast,
    compile,
    context_parallel,
    convert,
    expert_parallel,
    fsdp,
    pipeline_parallel,
    recompute,
    tensor_parallel,
)
from titanlite.parallel.build import Context
from titanlite.parallel.init import materialize
from titanlite.parallel.replica_check import check_replicas

Technique = Callable[[nn.Module, Context], list[str]]
"""Changes a model part on the meta device; returns notes for the log, none if it is not used."""

WHOLE: tuple[Technique, ...] = (
    # swaps layers: before anything uses their parameters, checks their class, or cuts the model
    convert.apply,
)
ORDER: tuple[Technique, ...] = (
    # splits parameters: before anything uses their shapes or wraps a forward method
    tensor_parallel.apply,
    expert_parallel.apply,  # splits the experts, which tensor parallel leaves alone
    # wraps attention only: before a block's forward method is recomputed or compiled
    context_parallel.apply,
    cast.apply,  # the parameters that FSDP2 ignores; innermost, like FSDP2's cast
    recompute.apply,  # before compiling, which then chooses what to keep within one graph
    # outside per-operation recomputation, so that received tokens are kept
    expert_parallel.dispatch,
    compile.apply,  # before sharding, so that gathering and freeing stay outside the graph
    # outside compiled blocks, until torch 2.14 is the minimum: 2.13 can't compile these
    partial(recompute.apply, around_graphs=True),
    fsdp.apply,  # last: takes all remaining parameters, and sets the prefetch schedule
)


def parallelize(model: nn.Module, context: Context) -> tuple[list[nn.Module], list[str]]:
    """Apply every technique that the job enables to the model on the meta device.

    WHOLE is applied to the model, then ORDER to each part. Return this rank's parts, which are the
    model or its pipeline stages in their order, and notes for the log.
    """
    notes: list[str] = []
    for technique in WHOLE:
        notes += technique(model, context)
    parts = own_parts(model, context)
    for part in parts:
        for technique in ORDER:
            notes += technique(part, context)
    return parts, list(dict.fromkeys(notes))


def own_parts(model: nn.Module, context: Context) -> list[nn.Module]:
    """Return the parts of the whole model that this rank trains."""
    stages = context.job.stages
    if len(stages.names) == 1:
        return [model]
    assert context.mesh.pp
    own = stages.ranks[context.mesh.pp.get_local_rank()]
    return pipeline_parallel.cut(model, context.job.spec, [stages.names[stage] for stage in own])


def build_parts(
    model: nn.Module, context: Context, seed: int | None
) -> tuple[list[nn.Module], list[str]]:
    """Return this rank's parts of the whole model, and notes for the log.

    The parts are on the device, with their initial values unless `seed` is None: then a checkpoint
    fills them, and replicas are compared afterwards.
    """
    parts, notes = parallelize(model, context)
    offload = context.job.config.training.enable_cpu_offload
    for part in parts:  # nothing has memory until the shards are final
        materialize(part, context.table, seed, context.device, offload)
    if seed is not None:
        check_replicas(parts, "after initialization", context)
    return parts, notes
