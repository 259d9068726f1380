"""Tensor and sequence parallel for any model, from the roles in its table.

Between the blocks' matrix products every rank holds a slice of the sequence; a module of column and row layers sees
the whole sequence, gathered once, and a slice of the heads or hidden units. So everything outside of such modules
must treat each token on its own. Parameters become DTensors on the `tp` mesh under their plain names; those that stay
whole are replicated there, and their gradients summed over the slices.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from titanlite.errors import UserError
from titanlite.layout import divisors
from titanlite.parallel import float8
from titanlite.parallel.build import shared_names, tie
from titanlite.parallel.param_view import forward_with_converted_params
from titanlite.registry import Role, Rule

SEQUENCE = Shard(1)
_BIAS_ROLE: dict[Role, Role] = {
    "embedding": "embedding",
    "column": "column",
    "row": "whole",
    "norm": "norm",
    "head": "head",
    "whole": "whole",
}
"""The role of what stands beside a weight in its module, such as a bias."""


def apply(model: nn.Module, blocks: str, table: dict[str, Rule], mesh: DeviceMesh, shard_loss: bool) -> None:
    """Split every module with parameters as its table says; logits become DTensors, split with `shard_loss`."""
    ties = shared_names(model)
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    roles = check(model, table, mesh.size())
    gathering = _gathering(model, blocks, roles)
    logits = Shard(-1) if shard_loss else Replicate()
    styles: dict[Role, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(-2)),
        "column": ColwiseParallel(),
        "row": RowwiseParallel(output_layouts=SEQUENCE),
        "norm": SequenceParallel(use_local_output=True),
        "head": ColwiseParallel(output_layouts=logits, use_local_output=False),
        "whole": ReplicatedModule(),
    }
    for name, role in roles.items():
        try:
            style = styles[role]
            if role == "row" and float8.scaled_as_a_whole(model.get_submodule(name)):
                style = float8.row_style(output_layouts=SEQUENCE)
            parallelize_module(model.get_submodule(name), mesh, style)
        except NotImplementedError:
            kind = type(model.get_submodule(name)).__name__
            raise UserError(
                f'tensor parallel: {name}.weight has the role "{role}", and {kind} cannot be split'
            ) from None
        if role == "embedding":
            # Its collective may be pending still, which a compiled block could not take.
            model.get_submodule(name).register_forward_hook(lambda module, args, output: output.clone())
    for path, readers in gathering.items():
        cast = float8.shared_cast([model.get_submodule(name) for name in readers])
        model.get_submodule(path).register_forward_pre_hook(partial(_gather, mesh, cast), prepend=True)
    tie(model, ties)  # splitting a module makes parameters of its own
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)


def check(model: nn.Module, table: dict[str, Rule], degree: int) -> dict[str, Role]:
    """The role of every module with parameters; a UserError where the table or the degree does not fit the model."""
    roles = _roles(model, table)
    for name, role in roles.items():
        # Vocabularies may be split unevenly; between a column and a row layer, slices of equal size are cut.
        if role in ("column", "row"):
            size = model.get_parameter(f"{name}.weight").size(0 if role == "column" else 1)
            if size % degree:
                raise UserError(
                    f"parallelism.tensor_parallel_degree: {degree} does not divide the {size} "
                    f"{'outputs' if role == 'column' else 'inputs'} of {name}; legal for it: "
                    + ", ".join(str(d) for d in divisors(size) if d <= 64)
                )
    return roles


def sum_gradients(parameters: Iterable[torch.Tensor]) -> None:
    """Sum what every rank found for parameters that stay whole. Where FSDP2 is applied, it has done so."""
    for parameter in parameters:
        gradient = parameter.grad
        split = isinstance(parameter, DTensor) and isinstance(gradient, DTensor)
        if split and gradient.placements != parameter.placements:
            parameter.grad = gradient.redistribute(placements=parameter.placements)


def whole_sequence(hidden: torch.Tensor, mesh: DeviceMesh, cast: float8.Cast | None = None) -> DTensor:
    """Hidden states of all tokens, of which every rank holds a slice, unless they are whole already."""
    if isinstance(hidden, DTensor):
        return hidden
    sequence = DTensor.from_local(hidden, mesh, (SEQUENCE,), run_check=False)
    return (cast(sequence) if cast else sequence).redistribute(placements=(Replicate(),))


def overlap(mesh: DeviceMesh) -> None:
    """Let inductor cut matrix products into pieces that overlap with the mesh's communication ("async TP").

    Both names are private in torch 2.11 to 2.13, and there are no public ones; read, not yet run, for want of GPUs.
    """
    from torch._inductor import config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    config._micro_pipeline_tp = True
    enable_symm_mem_for_group(mesh.get_group().group_name)


def _roles(model: nn.Module, table: dict[str, Rule]) -> dict[str, Role]:
    """The role of every module that has parameters of its own: that of its weight, or of all."""
    of: dict[str, Role] = {name: rule.tensor for name, rule in table.items()}
    for rule in table.values():
        if rule.tied:
            of[rule.tied] = "head"
    found: dict[str, Role] = {}
    for path, module in model.named_modules():
        own: dict[str, Role] = {
            name: of[f"{path}.{name}".lstrip(".")] for name, _ in module.named_parameters(recurse=False)
        }
        if not own:
            continue
        role = own.get("weight", next(iter(own.values())))
        for name, other in own.items():
            if name != "weight" and other != _BIAS_ROLE[role]:
                raise UserError(
                    f'tensor parallel: {path}.{name} has the role "{other}" in the model\'s table; beside a weight '
                    f'of the role "{role}" it must be "{_BIAS_ROLE[role]}"'
                )
        found[path] = role
    return found


def _gathering(model: nn.Module, blocks: str, roles: dict[str, Role]) -> dict[str, list[str]]:
    """Modules that gather their input once, and the layers that read it: the largest inside of blocks that hold
    column and row layers only, and what stands alone."""
    found: dict[str, list[str]] = {}
    for path, _ in model.named_modules():
        if any(path.startswith(f"{larger}.") for larger in found):
            continue
        inside = {name: role for name, role in roles.items() if name.startswith(f"{path}.")}
        deep = path.startswith(f"{blocks}.") and path.count(".") > blocks.count(".") + 1
        readers = [name for name, role in inside.items() if role == "column"]
        if deep and readers and {*inside.values()} <= {"column", "row"}:
            found[path] = readers
        elif roles.get(path) in ("column", "head"):
            found[path] = [path]
    return found


def _gather(mesh: DeviceMesh, cast: float8.Cast | None, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The whole sequence of a module's first input; in the backward pass gradients are summed and sliced again."""
    return (whole_sequence(args[0], mesh, cast), *args[1:])


class ReplicatedModule(ParallelStyle):
    """Every rank holds and uses all of a module's own parameters; each sees a part of the tokens or heads."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            whole = distribute_tensor(parameter.detach(), device_mesh, (Replicate(),))
            module.register_parameter(name, nn.Parameter(whole))
        forward_with_converted_params(_local, module, [name for name, _ in module.named_parameters(recurse=False)])
        return module


def _local(parameter: torch.Tensor) -> torch.Tensor:
    assert isinstance(parameter, DTensor)
    return parameter.to_local(grad_placements=(Partial(),))
