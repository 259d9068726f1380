"""The optimizer, with weight decay only where the config wants it."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

import torch
from torch.distributed.tensor import DTensor

from titanlite.config import schema
from titanlite.errors import UserError
from titanlite.registry import Rule

NamedParameters = list[tuple[str, torch.nn.Parameter]]


def split_by_decay(
    parameters: Iterable[tuple[str, torch.nn.Parameter]], table: dict[str, Rule], no_decay: list[str]
) -> tuple[NamedParameters, NamedParameters]:
    """The trained parameters with weight decay, and those without; every pattern must match something."""
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

    return [n for n in named if not exempt(n[0])], [n for n in named if exempt(n[0])]


def build_optimizer(
    decayed: NamedParameters, exempt: NamedParameters, config: schema.Optimizer
) -> torch.optim.Optimizer:
    """The optimizer over both groups; its learning rate is set before every step."""
    groups = [
        {"params": alike, "weight_decay": decay}
        for named, decay in ((decayed, config.weight_decay), (exempt, 0.0))
        # One kernel can't take sharded tensors together with whole ones.
        for sharded in (True, False)
        if (alike := [item for item in named if isinstance(item[1], DTensor) == sharded])
    ]
    flags = {name: name == implementation(config) for name in ("fused", "foreach")}
    if config.name == "SGD":
        return torch.optim.SGD(groups, lr=config.lr, **flags)
    algorithm = torch.optim.AdamW if config.name == "AdamW" else torch.optim.Adam
    return algorithm(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, **flags)


def implementation(config: schema.Optimizer) -> str:
    """How the step is really computed: torch 2.11 to 2.13 have no fused SGD for sharded parameters."""
    return "foreach" if (config.name, config.implementation) == ("SGD", "fused") else config.implementation


def state_per_element(config: schema.Optimizer) -> int:
    """Running means that the optimizer keeps for every element of a parameter."""
    return 0 if config.name == "SGD" else 2
