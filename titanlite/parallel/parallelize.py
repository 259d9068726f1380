"""THE fixed order in which techniques are applied, for every registered model."""

from __future__ import annotations

from fnmatch import fnmatchcase

import torch
from torch import nn

from titanlite.config.check import sharding_does_something
from titanlite.config.job import Job
from titanlite.errors import UserError
from titanlite.parallel import compile, fsdp, recompute, tensor
from titanlite.parallel.init import materialise, skeleton
from titanlite.parallel.mesh import Mesh
from titanlite.registry import Rule


def build_model(job: Job) -> tuple[nn.Module, dict[str, Rule]]:
    """The model on the meta device, in training.dtype, frozen where asked; and each parameter's row of its table."""
    model, table = skeleton(job.spec, job.model, job.positions)
    for parameter in model.parameters():  # buffers keep their own types
        parameter.data = parameter.data.to(getattr(torch, job.config.training.dtype))
    for pattern in job.config.model.freeze:
        names = [name for name in table if fnmatchcase(name, pattern)]
        if not names:
            raise UserError(f'model.freeze: "{pattern}" matches no parameter')
        for name in names:
            model.get_parameter(name).requires_grad_(False)
    return model, table


def parallelize(
    model: nn.Module, job: Job, mesh: Mesh, table: dict[str, Rule], seed: int, device: torch.device
) -> None:
    """Apply everything the job asks for to a model on the meta device, then give it values on `device`."""
    config, blocks = job.config, job.spec.blocks
    # Splitting layers comes before everything that looks at their parameters or wraps their forward pass.
    if job.layout.tp > 1:
        tensor.apply(model, blocks, table, mesh.tp, shard_loss=not config.parallelism.disable_loss_parallel)
        if config.parallelism.enable_async_tensor_parallel:
            tensor.overlap(mesh.tp)
    # Recomputing comes before compiling, which sees it, and chooses what to keep inside one graph.
    if config.activation_checkpoint.mode != "none":
        recompute.apply(model, blocks, config.activation_checkpoint)
    # Compiled before it is sharded, so that gathering and freeing parameters stay outside of the graph.
    if config.compile.enable and "model" in config.compile.components:
        compile.apply(model, blocks, config.compile)
    # Sharding comes after everything that changes layers, since it takes their parameters away.
    if sharding_does_something(job.layout, config.training):
        fsdp.shard(model, job, mesh, tied=any(rule.tied for rule in table.values()))
    # Nothing has memory until every rank knows its shard.
    materialise(model, table, seed, device)
