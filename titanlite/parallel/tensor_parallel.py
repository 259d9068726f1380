"""Tensor and sequence parallel for any model, from the roles in its table.

Between matrix products every rank holds a slice of the sequence; a module of column and row layers
sees the whole sequence, gathered once, and a slice of the heads or hidden units. So everything
outside such modules must treat each token by itself. Parameters become DTensors on the `tp` mesh
under their plain names.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    SequenceParallel,
    parallelize_module,
)

from titanlite.config.layout import divisors
from titanlite.errors import UserError
from titanlite.parallel import float8, lora
from titanlite.parallel.build import Context, shared_names, tie
from titanlite.parallel.dtensor import box_of
from titanlite.parallel.param_view import split_parameters
from titanlite.registry import Role, Rule
from titanlite.registry.lora import is_adapter
from titanlite.runtime.torch_private import enable_async_tensor_parallel

SEQUENCE = Shard(1)


def apply(model: nn.Module, context: Context) -> list[str]:
    """Split every module with parameters according to its role in the table.

    Logits become DTensors, split over the vocabulary unless disable_loss_parallel is set.
    """
    mesh = context.mesh.tp
    if mesh is None:
        return []
    settings = context.job.config.parallelism
    logits: Shard | Replicate = Shard(-1)
    kind = "split"
    if settings.disable_loss_parallel:
        logits = Replicate()
        kind = "replicated"
    ties = shared_names(model)
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    roles = check(model, context.table, mesh.size())
    gathering = _gathering(model, context.job.spec.blocks, roles)
    for name, role in roles.items():
        if role != "expert":
            _split_module(model.get_submodule(name), name, role, mesh, logits)
    for path, readers in gathering.items():
        cast = float8.shared_cast([model.get_submodule(name) for name in readers])
        gather = partial(_gather, mesh, cast)
        model.get_submodule(path).register_forward_pre_hook(gather, prepend=True)
    tie(model, ties)  # splitting a module creates new parameters
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    note = f"Applied tensor parallel on {mesh.size()} ranks, logits {kind}"
    if not settings.enable_async_tensor_parallel:
        return [note]
    # Untested: no GPUs available that reach each other's memory.
    enable_async_tensor_parallel(mesh.get_group())
    note += ", overlapped with computation (async)"
    # Until torch 2.14 is tried on GPUs: 2.13 cannot fuse the gather of one sequence.
    if context.job.batch.local == 1:
        note += ", but for all-gathers: these need a training.local_batch_size of 2 or more"
    return [note]


def _split_module(
    module: nn.Module, name: str, role: Role, mesh: DeviceMesh, logits: Shard | Replicate
) -> None:
    """Turn a module's parameters into DTensors, split or whole according to its role."""
    styles: dict[Role, ParallelStyle] = {
        "embedding": LocalParameters(Shard(0)),
        "column": ColwiseParallel(),
        "row": float8.row_style(module)(output_layouts=SEQUENCE),
        "norm": SequenceParallel(use_local_output=True),
        "head": ColwiseParallel(output_layouts=logits, use_local_output=False),
        "replicated": LocalParameters(Replicate()),
    }
    adapter = lora.take_adapter(module)
    try:
        parallelize_module(module, mesh, styles[role])
    except NotImplementedError:
        raise UserError(
            f'tensor parallel: {name}.weight has the role "{role}", and {type(module).__name__} '
            "cannot be split"
        ) from None
    lora.split_adapter(module, adapter, role, mesh)
    if role == "embedding":
        own = box_of(module.get_parameter("weight"))[0]
        module.forward = partial(_look_up, module.forward, own, mesh)  # type: ignore


def check(model: nn.Module, table: dict[str, Rule], degree: int) -> dict[str, Role]:
    """Return the role of every module with parameters.

    Raise a UserError if the table or the degree does not fit.
    """
    roles = _roles(model, table)
    for name, role in roles.items():
        # A vocabulary may be split unevenly; slices between a column and a row layer may not.
        if role not in ("column", "row"):
            continue
        weight = model.get_parameter(f"{name}.weight")
        size = weight.size(0)
        unit = "outputs"
        if role == "row":
            size = weight.size(1)
            unit = "inputs"
        if size % degree:
            legal = ", ".join(str(divisor) for divisor in divisors(size) if divisor <= 64)
            raise UserError(
                f"parallelism.tensor_parallel_degree: {degree} does not divide the {size} {unit} "
                f"of {name}; legal for it: {legal}"
            )
    return roles


def sum_gradients(parameters: Iterable[torch.Tensor]) -> None:
    """Sum the gradients of replicated parameters over the ranks, unless FSDP2 has done so."""
    for parameter in parameters:
        gradient = parameter.grad
        is_split = isinstance(parameter, DTensor) and isinstance(gradient, DTensor)
        if is_split and gradient.placements != parameter.placements:
            parameter.grad = gradient.redistribute(placements=parameter.placements)


def whole_sequence(
    hidden: torch.Tensor, mesh: DeviceMesh, cast: float8.Cast | None = None
) -> DTensor:
    """Gather the hidden states of all tokens from the ranks' slices, unless they are whole."""
    if isinstance(hidden, DTensor):
        return hidden
    sequence = DTensor.from_local(hidden, mesh, (SEQUENCE,), run_check=False)
    if cast:
        sequence = cast(sequence)
    return sequence.redistribute(placements=(Replicate(),))


def _roles(model: nn.Module, table: dict[str, Rule]) -> dict[str, Role]:
    """Return the role of every module that owns parameters: its weight's, or that of all."""
    roles: dict[str, Role] = {name: rule.tensor for name, rule in table.items()}
    for rule in table.values():
        if rule.tied:
            roles[rule.tied] = "head"
    by_module: dict[str, Role] = {}
    for path, module in model.named_modules():
        names = dict(module.named_parameters(recurse=False))
        own = {name: roles[f"{path}.{name}".lstrip(".")] for name in names}
        if not own:
            continue
        role = own.get("weight", next(iter(own.values())))
        bias_role = role
        if role == "row":
            bias_role = "replicated"
        for name, other in own.items():
            if name != "weight" and not is_adapter(name) and other != bias_role:
                raise UserError(
                    f'tensor parallel: {path}.{name} has the role "{other}" in the model\'s table; '
                    f'with a weight of the role "{role}" it must be "{bias_role}"'
                )
        by_module[path] = role
    return by_module


def _gathering(model: nn.Module, blocks: str, roles: dict[str, Role]) -> dict[str, list[str]]:
    """Return the modules that gather their input once, with the layers that read it.

    In Llama these are layers.N.attention (read by wq, wk and wv), layers.N.feed_forward (w1 and w3)
    and output. In general: below a block, the outermost module whose matrices are all column or row
    layers (vectors, such as norms of heads, do not count); any other column or head layer gathers
    its own input.
    """
    matrices: dict[str, Role] = {}
    for name, role in roles.items():
        if role != "replicated" or not _has_vectors(model, name):
            matrices[name] = role
    readers: dict[str, list[str]] = {}
    for path, _ in model.named_modules():
        if any(path.startswith(f"{larger}.") for larger in readers):
            continue
        inside = {name: role for name, role in matrices.items() if name.startswith(f"{path}.")}
        columns = [name for name, role in inside.items() if role == "column"]
        is_below_block = path.startswith(f"{blocks}.") and path.count(".") > blocks.count(".") + 1
        if is_below_block and columns and {*inside.values()} <= {"column", "row"}:
            readers[path] = columns
        elif roles.get(path) in ("column", "head"):
            readers[path] = [path]
    return readers


def _has_vectors(model: nn.Module, path: str) -> bool:
    parameters = model.get_submodule(path).parameters(recurse=False)
    return all(parameter.dim() == 1 for parameter in parameters)


def _gather(
    mesh: DeviceMesh, cast: float8.Cast | None, module: nn.Module, args: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Gather the sequence of a module's first input.

    The backward pass sums its gradients and slices them again.
    """
    return (whole_sequence(args[0], mesh, cast), *args[1:])


class LocalParameters(ParallelStyle):
    """Lets a module's forward method see this rank's part of its parameters: rows, or all."""

    def __init__(self, placement: Shard | Replicate) -> None:
        self._placement = placement

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        split_parameters(module, device_mesh, self._placement, self._local)
        return module

    def _local(self, parameter: torch.Tensor) -> torch.Tensor:
        assert isinstance(parameter, DTensor)
        gradient: Placement = self._placement
        if self._placement == Replicate():
            gradient = Partial()  # each rank sees some of the tokens, so gradients must be summed
        return parameter.to_local(grad_placements=(gradient,))


def _look_up(
    forward: Callable[..., Any], own: slice, mesh: DeviceMesh, tokens: torch.Tensor
) -> torch.Tensor:
    """Look up the rows that this rank has; return a slice of the sequence, summed over ranks.

    torch's RowwiseParallel would create a gradient for all rows on every rank.
    """
    elsewhere = (tokens < own.start) | (tokens >= own.stop)
    rows = forward((tokens - own.start).masked_fill(elsewhere, 0))
    rows = rows.masked_fill(elsewhere.unsqueeze(-1), 0)
    summed = DTensor.from_local(rows, mesh, (Partial(),), run_check=False)
    # Shard(-2), since positions have no batch dimension. The clone waits for the collective, which
    # a compiled block can't.
    return summed.redistribute(placements=(Shard(-2),)).to_local().clone()
