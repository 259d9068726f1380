"""THE fixed order in which techniques are applied, for every registered model."""

from collections.abc import Callable
from functools import partial

from torch import nn

from titanlite.parallel import compile, context, convert, expert, fsdp, pipeline, recompute, replicated, tensor
from titanlite.parallel.build import Context
from titanlite.parallel.init import materialize
from titanlite.parallel.replica_check import check_replicas

Technique = Callable[[nn.Module, Context], list[str]]
"""Changes a model part on the meta device; returns notes for the log, none if it has nothing to do."""

WHOLE: tuple[Technique, ...] = (
    convert.apply,  # swaps layers: before anything takes their parameters, looks at their class, or cuts the model
)
ORDER: tuple[Technique, ...] = (
    tensor.apply,  # splits parameters: before anything looks at their shapes or wraps a forward method
    expert.apply,  # beside tensor parallel, which leaves experts alone
    context.apply,  # around attention only: before a block's forward method is recomputed or compiled
    replicated.apply,  # casts what FSDP will not, innermost, where FSDP would cast its own
    recompute.apply,  # before compiling, which then chooses what to keep within one graph
    expert.exchange,  # around the products that are recomputed by operation: what other ranks sent is kept
    compile.apply,  # before sharding, so that gathering and freeing parameters stay outside of the graph
    partial(recompute.apply, around_graphs=True),  # what torch 2.13 can't compile once it is recomputed
    fsdp.apply,  # last: takes every parameter that is left, and sets the prefetch schedule
)


def parallelize(model: nn.Module, context: Context) -> tuple[list[nn.Module], list[str]]:
    """Apply every technique that the job enables to the model on the meta device: WHOLE, then ORDER to each part.

    Return this rank's parts, which are the model or its pipeline stages in their order, and notes for the log.
    """
    notes = [note for technique in WHOLE for note in technique(model, context)]
    parts = split(model, context)
    notes += [note for part in parts for technique in ORDER for note in technique(part, context)]
    return parts, list(dict.fromkeys(notes))


def split(model: nn.Module, context: Context) -> list[nn.Module]:
    """Return the parts of the whole model that this rank trains."""
    stages = context.job.stages
    if len(stages.names) == 1:
        return [model]
    own = stages.ranks[context.mesh.world["pp"].get_local_rank()]
    return pipeline.split(model, context.job.spec, [stages.names[stage] for stage in own])


def build_parts(model: nn.Module, context: Context, seed: int) -> tuple[list[nn.Module], list[str]]:
    """Return this rank's parts of the whole model, with their initial values on the device, and notes for the log."""
    parts, notes = parallelize(model, context)
    for part in parts:  # nothing has memory until every rank knows its shard
        materialize(part, context.table, seed, context.device, context.job.config.training.enable_cpu_offload)
    check_replicas(parts, "after initialization", context)
    return parts, notes
