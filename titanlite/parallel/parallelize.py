"""THE fixed order in which techniques are applied, for every registered model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from titanlite.config.check import sharding_does_something
from titanlite.config.job import Job
from titanlite.converters import Converter, convert
from titanlite.errors import UserError
from titanlite.parallel import agree, compile, fsdp, keep_whole, recompute, tensor
from titanlite.parallel.init import materialise, skeleton
from titanlite.parallel.mesh import Mesh
from titanlite.registry import Rule


def build_model(job: Job) -> tuple[nn.Module, dict[str, Rule]]:
    """The model on the meta device, in training.dtype, frozen where asked; and each parameter's row of its table."""
    model, table = skeleton(job.spec, job.model, job.positions)
    for parameter in model.parameters():  # buffers keep their own types
        parameter.data = parameter.data.to(getattr(torch, job.config.training.dtype))
    for name in _matching(model, "model.freeze", job.config.model.freeze):
        model.get_parameter(name).requires_grad_(False)
    return model, table


def _matching(model: nn.Module, key: str, patterns: list[str]) -> list[str]:
    """Parameters that a key's patterns name, by their first name or a tie's second; each must match something."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = list(model.named_parameters(remove_duplicate=False))
    found: dict[str, None] = {}
    for pattern in patterns:
        names = [first[id(parameter)] for name, parameter in every if fnmatchcase(name, pattern)]
        if not names:
            raise UserError(f'{key}: "{pattern}" matches no parameter')
        found |= dict.fromkeys(names)
    return list(found)


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
    materialise(model, table, seed, device, in_host_memory=job.config.training.enable_cpu_offload)
    agree.check_replicas(model, "after initialisation", device)
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
    keep_whole.compute_in(getattr(torch, config.training.mixed_precision_param), model, kept)
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
    if sharding_does_something(job.layout, config.training):
        fsdp.shard(model, job, mesh, kept, tied=any(rule.tied for rule in table.values()))
    return names
