"""The optimizer: which parameters are trained, with weight decay only where the config wants it, by which algorithm.

An algorithm is a registered function from the trained parameters and the config to a torch optimizer; `groups` makes
what most of them need. What the loop does to any optimizer is to set `lr` and `training_step` in its groups before
every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from titanlite.config import schema
from titanlite.config.schema import JobConfig
from titanlite.errors import UserError
from titanlite.optim.bf16_state import BF16State
from titanlite.parallel.dtensor import local_part
from titanlite.registry import OptimizerSpec, Role, Rule, get_optimizer, import_object


@dataclass(frozen=True)
class TrainedParam:
    """A parameter that is trained, and what an optimizer may want to know of it."""

    name: str
    parameter: nn.Parameter
    role: Role
    decays: bool
    is_hidden_matrix: bool
    """A matrix inside of a block, from hidden values to hidden values; no embedding, head or norm."""


def trained_parameters(
    parameters: Iterable[tuple[str, nn.Parameter]], table: dict[str, Rule], blocks: str, no_decay: Sequence[str]
) -> list[TrainedParam]:
    """Every parameter that is not frozen; each pattern of `no_decay` must match something."""
    named = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    if not named:
        raise UserError("model.freeze leaves nothing to train")
    for pattern in set(no_decay) - {"norms", "biases"}:
        if not any(fnmatchcase(name, pattern) for name, _ in named):
            raise UserError(f'optimizer.no_decay: "{pattern}" matches no trained parameter')

    def exempt(name: str) -> bool:
        return (
            ("norms" in no_decay and table[name].tensor == "norm" and name.endswith(".weight"))
            or ("biases" in no_decay and name.endswith(".bias"))
            or any(fnmatchcase(name, pattern) for pattern in no_decay)
        )

    found = []
    for name, parameter in named:
        role = table[name].tensor
        inside = name.startswith(f"{blocks}.") and role in ("column", "row", "whole")
        found.append(
            TrainedParam(name, parameter, role, not exempt(name), is_hidden_matrix=inside and parameter.dim() == 2)
        )
    return found


def build_optimizer(trained: Sequence[TrainedParam], config: JobConfig, seed: int = 0) -> torch.optim.Optimizer:
    """The optimizer that the config names, its state as narrow as asked for."""
    optimizer: torch.optim.Optimizer = import_object(_spec(config).build)(trained, config)
    return BF16State(optimizer, seed) if config.optimizer.state_dtype == "bfloat16" else optimizer


def groups(trained: Sequence[TrainedParam], settings: schema.Optimizer, **more: Any) -> list[dict[str, Any]]:
    """Parameter groups, with their parameters' names, for what decays and what does not."""
    return [
        {"params": alike, "weight_decay": settings.weight_decay if decays else 0.0, **more}
        for decays in (True, False)
        # One kernel can't take sharded tensors together with whole ones.
        for sharded in (True, False)
        if (
            alike := [
                (item.name, item.parameter)
                for item in trained
                if item.decays == decays and isinstance(item.parameter, DTensor) == sharded
            ]
        )
    ]


def adam(trained: Sequence[TrainedParam], config: JobConfig) -> torch.optim.Optimizer:
    algorithm = torch.optim.AdamW if config.optimizer.name == "AdamW" else torch.optim.Adam
    return algorithm(groups(trained, config.optimizer), **adam_options(config.optimizer))


def sgd(trained: Sequence[TrainedParam], config: JobConfig) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups(trained, config.optimizer), lr=config.optimizer.lr, **_flags(config.optimizer))


def adam_options(settings: schema.Optimizer) -> dict[str, Any]:
    """What torch's Adam and AdamW are told."""
    return {
        "lr": settings.lr,
        "betas": (settings.beta1, settings.beta2),
        "eps": settings.eps,
        **_flags(settings),
    }


def _flags(settings: schema.Optimizer) -> dict[str, bool]:
    return {name: name == implementation(settings) for name in ("fused", "foreach")}


def implementation(settings: schema.Optimizer) -> str:
    """How the step is really computed: torch 2.11 to 2.13 have no fused SGD for sharded parameters."""
    return "foreach" if (settings.name, settings.implementation) == ("SGD", "fused") else settings.implementation


def optimizer_bytes(trained: Sequence[TrainedParam], config: JobConfig) -> int:
    """What the optimizer will keep of this rank's parts of the parameters."""
    spec, total = _spec(config), 0
    for item in trained:
        tensors = spec.matrix_states if item.is_hidden_matrix and spec.matrix_states is not None else spec.states
        size = item.parameter.element_size()
        size = min(2, size) if config.optimizer.state_dtype == "bfloat16" else size
        total += tensors * size * local_part(item.parameter).numel()
    return total


def _spec(config: JobConfig) -> OptimizerSpec:
    return get_optimizer(config.optimizer.name, config.model.package)
