"""THE fixed order in which techniques are applied, for every registered model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from titanlite.config.job import Job
from titanlite.errors import UserError
from titanlite.parallel import compile, fsdp, recompute, replica_check, replicated, tensor
from titanlite.parallel.build import _matching
from titanlite.parallel.convert import Converter, convert
from titanlite.parallel.init import materialize
from titanlite.parallel.mesh import Mesh
from titanlite.registry import Rule


def parallelize(
    model: nn.Module,
    job: Job,
    mesh: Mesh,
    table: dict[str, Rule],
    converters: Sequence[Converter],
    seed: int,
    device: torch.device,
    say: Callable[[str], object],
) -> list[nn.Parameter]:
    """Apply everything the job asks for to a model on the meta device, then give it values on `device`.

    Returns the parameters that were kept whole, whose gradients are still to be summed after each step.
    """
    kept = apply_in_order(model, job, mesh, table, converters, say)
    # Nothing has memory until every rank knows its shard.
    materialize(model, table, seed, device, in_host_memory=job.config.training.enable_cpu_offload)
    replica_check.check_replicas(model, "after initialization", device)
    return [model.get_parameter(name) for name in kept]


def apply_in_order(
    model: nn.Module,
    job: Job,
    mesh: Mesh,
    table: dict[str, Rule],
    converters: Sequence[Converter],
    say: Callable[[str], object],
) -> list[str]:
    """THE order. The model stays without memory; returns the names of parameters that were kept whole."""
    config, blocks = job.config, job.spec.blocks
    # Layers are swapped, for float8 ones say, before anything takes their parameters or looks at their class.
    convert(model, converters, say)
    # Splitting layers comes before everything that looks at their parameters or wraps their forward pass.
    if job.layout.tp > 1:
        tensor.apply(model, blocks, table, mesh.tp, shard_loss=not config.parallelism.disable_loss_parallel)
        if config.parallelism.enable_async_tensor_parallel:
            tensor.overlap(mesh.tp)
    # What is kept whole is cast inside of all that wraps a forward method, as FSDP's cast would be.
    names = _matching(model, "parallelism.fsdp_keep_whole", config.parallelism.fsdp_keep_whole)
    kept = [model.get_parameter(name) for name in names]
    if len(kept) == len(table):
        raise UserError("parallelism.fsdp_keep_whole matches every parameter: replicate instead of sharding")
    replicated.compute_in(getattr(torch, config.training.mixed_precision_param), model, kept)
    # Recomputing comes before compiling, which sees it, and chooses what to keep inside one graph. But torch 2.13
    # (2.11 does not) fails on a graph with a mesh in it that is recomputed whole: there a compiled block runs again.
    recomputing = config.activation_checkpoint
    outside = job.layout.tp > 1 and recompute.keeps_nothing(recomputing)
    if recomputing.mode in ("full", "selective") and not outside:
        recompute.apply(model, blocks, recomputing)
    # Compiled before it is sharded, so that gathering and freeing parameters stay outside of the graph.
    if config.compile.enable and "model" in config.compile.components:
        has_budget = config.activation_checkpoint.mode == "memory_budget"
        budget = config.activation_checkpoint.memory_budget if has_budget else None
        compile.apply(model, blocks, config.compile, budget)
    if outside:
        recompute.apply(model, blocks, recomputing)
    # Sharding comes after everything that changes layers, since it takes their parameters away.
    if fsdp.does_something(job.layout, config.training):
        fsdp.shard(model, job, mesh, kept, tied=any(rule.tied for rule in table.values()))
    return names
