"""The plain model on the meta device, before any technique is applied; and parameters that two modules share."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from titanlite.config.job import Job
from titanlite.errors import UserError
from titanlite.registry import ModelSpec, Rule, assign


def build_model(job: Job) -> tuple[nn.Module, dict[str, Rule]]:
    """The model on the meta device, in training.dtype, frozen where asked; and each parameter's row of its table."""
    model, table = build_meta_model(job.spec, job.model, job.positions)
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


def shared_names(model: nn.Module) -> dict[str, str]:
    """The second name of every parameter that two modules share, to its first."""
    first: dict[int, str] = {}
    ties = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            ties[name] = first[id(parameter)]
    return ties


def tie(model: nn.Module, ties: Mapping[str, str]) -> None:
    """Make each second name stand for the parameter of its first."""
    for second, first in ties.items():
        module, _, attribute = second.rpartition(".")
        setattr(model.get_submodule(module), attribute, model.get_parameter(first))


def build_meta_model(spec: ModelSpec, flavor: Any, positions: int = 1) -> tuple[nn.Module, dict[str, Rule]]:
    """A model on the meta device, and each parameter's row of its table."""
    with torch.device("meta"):
        model = spec.module(flavor, positions)
    names = [name for name, _ in model.named_parameters()]
    return model, assign(spec.rules(flavor), names, ties=shared_names(model))
