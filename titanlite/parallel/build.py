"""The plain model on the meta device with its table; the Context of techniques; tied parameters.

The table covers the whole model, so that names and patterns mean the same on a rank that holds only
a part of it.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from titanlite.config.job import Job
from titanlite.errors import UserError
from titanlite.parallel.lora import adapt
from titanlite.registry import ModelSpec, Rule, assign

if TYPE_CHECKING:
    from titanlite.parallel.mesh import Mesh

ParameterTable = dict[str, Rule]
"""The row of every parameter of a model."""


class Converter(Protocol):
    """Swaps layers of a model; built with the Job on every rank.

    If it has a method `apply(model, context)`, that is called instead of `convert`.
    """

    def convert(self, model: nn.Module) -> list[str]:
        """Swap layers of the whole model on the meta device; return lines for the log."""

    def after_optimizer_step(self, parts: Sequence[nn.Module]) -> None:
        """React to new weights: before the first step and after each one."""


def exchange_sizes(sizes: torch.Tensor, rows: int) -> list[list[int]]:
    """Return how many of `rows` go to each rank of experts, and how many come from it.

    Only this waits for the device, since collectives take their sizes from the host.
    """
    return sizes.tolist()


@dataclass(frozen=True)
class Context:
    """What every technique receives besides the model part."""

    job: Job
    mesh: "Mesh"
    table: ParameterTable
    """The rule of every parameter of the whole model."""
    device: torch.device
    converters: Sequence[Converter] = ()
    exchange_sizes: Callable[[torch.Tensor, int], list[list[int]]] = exchange_sizes
    """A rehearsal, which has no values, passes another one."""

    def blocks(self, part: nn.Module) -> dict[int, nn.Module]:
        """Return a part's blocks by their number in the whole model."""
        blocks = part.get_submodule(self.job.spec.blocks)
        return {int(number): block for number, block in blocks.named_children()}


def build_model(job: Job) -> tuple[nn.Module, ParameterTable]:
    """Return the whole model on the meta device, in training.dtype and with model.freeze applied,
    and its table.
    """
    model, table = build_meta_model(job.spec, job.model_config, job.positions)
    dtype = getattr(torch, job.config.training.dtype)
    for parameter in model.parameters():  # buffers keep their own types
        parameter.data = parameter.data.to(dtype)
    for name in match_parameters(table, "model.freeze", job.config.model.freeze):
        model.get_parameter(name).requires_grad_(False)
    return model, table


def build_meta_model(
    spec: ModelSpec, flavor: Any, positions: int = 1
) -> tuple[nn.Module, ParameterTable]:
    """Return a model on the meta device and the rule of each of its parameters."""
    with torch.device("meta"):
        model = spec.module(flavor, positions)
        rules = spec.rules(flavor)
        if spec.adapters:
            adapt(model, spec.adapters, rules)
            rules += spec.adapters.rows(rules)
    names = list(dict(model.named_parameters()))
    try:
        return model, assign(rules, names, ties=shared_names(model))
    except UserError as error:
        code = getattr(spec.rules, "__code__", None)
        where = ""
        if code:
            where = f"\n  the table is in {code.co_filename}"
        raise UserError(f"{error}{where}") from None


def match_parameters(table: Mapping[str, Rule], key: str, patterns: Iterable[str]) -> list[str]:
    """Return the parameters that a key's patterns match; a tied one matches by either name.

    Each pattern must match a parameter.
    """
    first_names: dict[str, str] = {}
    for name, rule in table.items():
        first_names[name] = name
        if rule.tied:
            first_names[rule.tied] = name
    matched: dict[str, None] = {}
    for pattern in patterns:
        names = [name for alias, name in first_names.items() if fnmatchcase(alias, pattern)]
        if not names:
            raise UserError(f'{key}: "{pattern}" matches no parameter')
        matched |= dict.fromkeys(names)
    return list(matched)


def named_parameters(
    part: nn.Module, table: Mapping[str, Rule]
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield a part's parameters by their names in the table.

    A part may hold only the second name of a tie, which the table lists under the first.
    """
    first_names = {rule.tied: name for name, rule in table.items()}
    for name, parameter in part.named_parameters():
        yield first_names.get(name, name), parameter


def persistent_buffers(part: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that a checkpoint stores, by name."""
    names = part.state_dict(keep_vars=True).keys()
    return {name: buffer for name, buffer in part.named_buffers() if name in names}


def layer_pattern(name: str, blocks: str) -> str:
    """Return a module's or parameter's name with a wildcard for the number of its block."""
    return re.sub(rf"^({re.escape(blocks)})\.\d+\.", r"\1.*.", name)


def shared_names(model: nn.Module) -> dict[str, str]:
    """Map the second name of every parameter that two modules share to its first name."""
    first_names = {parameter: name for name, parameter in model.named_parameters()}
    shared: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = first_names[parameter]
        if name != first:
            shared[name] = first
    return shared


def tie(model: nn.Module, ties: Mapping[str, str]) -> None:
    """Make each second name refer to the parameter of the first."""
    for second, first in ties.items():
        module, _, attribute = second.rpartition(".")
        setattr(model.get_submodule(module), attribute, model.get_parameter(first))
