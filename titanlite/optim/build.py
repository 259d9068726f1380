"""Build the optimizer: which parameters it trains, which of them decay, and by which algorithm.

An algorithm is a registered function from the trained parameters and the config to a torch optimizer. Before every
step the trainer sets `lr` and `training_step` in each parameter group; it does nothing else to an optimizer.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product
from pkgutil import resolve_name
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from titanlite.config import schema
from titanlite.config.schema import JobConfig
from titanlite.errors import UserError
from titanlite.optim.bf16_state import BF16State
from titanlite.parallel.build import named_parameters
from titanlite.parallel.dtensor import local_part
from titanlite.registry import OptimizerSpec, Role, Rule, get_optimizer


@dataclass(frozen=True)
class TrainedParam:
    """A parameter that is trained, with what an optimizer may need to know about it."""

    name: str
    parameter: nn.Parameter
    role: Role
    decays: bool
    is_hidden_matrix: bool
    """A matrix, or a stack of experts', that maps hidden values to hidden values: not an embedding, head or norm."""


def check_trained(model: nn.Module, no_decay: Sequence[str]) -> None:
    """Raise if the whole model has nothing to train, or if a pattern of `no_decay` matches nothing of that."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not names:
        raise UserError("model.freeze leaves nothing to train")
    if [*no_decay] == ["biases"] and not any(name.endswith(".bias") for name in names):
        raise UserError('optimizer.no_decay: "biases" matches no trained parameter: the model has none')
    for pattern in set(no_decay) - {"norms", "biases"}:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UserError(f'optimizer.no_decay: "{pattern}" matches no trained parameter')


def trained_parameters(
    parts: Iterable[nn.Module], table: dict[str, Rule], blocks: str, no_decay: Sequence[str]
) -> list[TrainedParam]:
    """Return the parameters of this rank's model parts that are not frozen; `table` is that of the whole model."""
    trained = []
    for name, parameter in (item for part in parts for item in named_parameters(part, table)):
        if parameter.requires_grad:
            role = table[name].tensor
            exempt = any(fnmatchcase(name, pattern) for pattern in no_decay)
            is_norm = role == "norm" or (role == "replicated" and parameter.dim() == 1)
            exempt |= "norms" in no_decay and is_norm and name.endswith(".weight")
            exempt |= "biases" in no_decay and name.endswith(".bias")
            in_block = name.startswith(f"{blocks}.") and role in ("column", "row", "replicated")
            hidden = role == "expert" or (in_block and parameter.dim() == 2)
            trained.append(TrainedParam(name, parameter, role, not exempt, hidden))
    return trained


def build_optimizer(
    trained: Sequence[TrainedParam], config: JobConfig, seed: int = 0, stage: dist.ProcessGroup | None = None
) -> torch.optim.Optimizer:
    """Build the optimizer that the config names, with its state in optimizer.state_dtype.

    `stage` are the ranks that share the parameters, None for all.
    """
    spec = _spec(config)
    optimizer: torch.optim.Optimizer = resolve_name(spec.build)(trained, config, *[stage] * spec.communicates)
    return BF16State(optimizer, seed) if config.optimizer.state_dtype == "bfloat16" else optimizer


def groups(trained: Sequence[TrainedParam], settings: schema.Optimizer, **more: Any) -> list[dict[str, Any]]:
    """Return parameter groups, with parameter names, for what decays and what does not; `more` goes into each."""
    param_groups = []
    for kind in product((True, False), repeat=2):  # one fused kernel cannot take sharded and plain tensors together
        members = [item for item in trained if (item.decays, isinstance(item.parameter, DTensor)) == kind]
        if members:
            weight_decay = settings.weight_decay if members[0].decays else 0.0
            params = [(item.name, item.parameter) for item in members]
            param_groups.append({"params": params, "weight_decay": weight_decay, **more})
    return param_groups or [{"params": [], **more}]  # a pipeline stage may have nothing to train


def adam(trained: Sequence[TrainedParam], config: JobConfig) -> torch.optim.Optimizer:
    algorithm = torch.optim.AdamW if config.optimizer.name == "AdamW" else torch.optim.Adam
    return algorithm(groups(trained, config.optimizer), **adam_options(config.optimizer))


def sgd(trained: Sequence[TrainedParam], config: JobConfig) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups(trained, config.optimizer), lr=config.optimizer.lr, **_flags(config.optimizer))


def adam_options(settings: schema.Optimizer) -> dict[str, Any]:
    """Return the keyword arguments of torch's Adam and AdamW."""
    return {"lr": settings.lr, "betas": (settings.beta1, settings.beta2), "eps": settings.eps, **_flags(settings)}


def _flags(settings: schema.Optimizer) -> dict[str, bool]:
    return {name: name == implementation(settings) for name in ("fused", "foreach")}


def implementation(settings: schema.Optimizer) -> str:
    """Return the implementation that runs: torch 2.11 to 2.13 lack a fused SGD for sharded parameters."""
    return "foreach" if (settings.name, settings.implementation) == ("SGD", "fused") else settings.implementation


def optimizer_bytes(trained: Sequence[TrainedParam], config: JobConfig) -> int:
    """Return the bytes of optimizer state for this rank's parts of the parameters."""
    spec, total = _spec(config), 0
    for item in trained:
        tensors = spec.matrix_states if item.is_hidden_matrix and spec.matrix_states is not None else spec.states
        size = item.parameter.element_size()
        size = min(2, size) if config.optimizer.state_dtype == "bfloat16" else size
        total += tensors * size * local_part(item.parameter).numel()
    return total


def _spec(config: JobConfig) -> OptimizerSpec:
    return get_optimizer(config.optimizer.name, config.model.package)
