"""What is looked at in a few steps of a model, and how two such looks are compared.

The error of a tensor is ||found - expected|| / ||expected||, of the full tensor. Where ||expected|| is less than
FLOOR of the norm of all tensors of its kind, that takes its place: what is zero but for rounding, such as a key
bias's gradient under softmax, has an error of the size of what was summed, not of what is left.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from titanlite.config.schema import JobConfig
from titanlite.data.loader import MicroBatch
from titanlite.data.packing import IGNORED
from titanlite.verify.table import SAMPLES

BOUNDS = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 1e-1, "pure bf16": 1e-1}
"""Largest error of a row. bfloat16 mixed precision is compared with float32: by trial its 8 bits err by up to 5e-2 in
the models here, on one rank as on many, where a sum that is dropped or doubled errs by 5e-1 and more. Where weights
themselves are bfloat16, the reference's are too."""
FLOOR = 1e-3
STEPS = {"SGD": 1, "AdamW": 3, "Muon": 1}
"""Steps of each optimizer, one after the other; of Muon in float64 alone, where its error says most."""
INITIAL, GRADIENT, NORM, LOSS = "initial value of", "gradient of", "norm of all gradients", "loss"

Observed = dict[str, dict[str, torch.Tensor]]
"""Full tensors by what they are and their names."""


@dataclass(frozen=True)
class Finding:
    """The worst of a row: what it is, its name, and its error; infinite where there is nothing to measure."""

    what: str
    name: str
    error: float = math.inf

    def __str__(self) -> str:
        return f"{self.what} {self.name}".rstrip()


def named(config: JobConfig, optimizer: str) -> JobConfig:
    """The same config with another optimizer.

    SGD goes tensor by tensor and without decay: DTensor searches how each new operation is split, for seconds on
    three mesh dimensions, most of all for lists of tensors. AdamW's step is on lists, with decay.
    """
    plainly = {"implementation": "for-loop", "weight_decay": 0.0} if optimizer == "SGD" else {}
    changed = {"name": optimizer, **plainly}
    return config.model_copy(update={"optimizer": config.optimizer.model_copy(update=changed)})


def steps_of(config: JobConfig) -> dict[str, int]:
    """Those of STEPS that a row takes."""
    return {name: steps for name, steps in STEPS.items() if name != "Muon" or config.training.dtype == "float64"}


def after(optimizer: str) -> str:
    return f"after {STEPS[optimizer]} {optimizer} step{'s' * (STEPS[optimizer] > 1)}:"


def ragged_batch(vocab_size: int, tokens: int) -> MicroBatch:
    """Labels with holes; the first half of the samples has nothing else."""
    generator = torch.Generator().manual_seed(7)
    text = torch.randint(vocab_size, (SAMPLES, tokens + 1), generator=generator)
    labels = text[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = IGNORED
    labels[: SAMPLES // 2] = IGNORED
    return MicroBatch(torch.stack([text[:, :-1], labels], dim=1))


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: _full(parameter) for name, parameter in model.named_parameters()}


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: _full(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def _full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor, on every rank."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def compare(found: Observed, expected: Observed, bound: float) -> Finding:
    """The worst of the first kind that is beyond the bound, since what follows comes of it; else the worst of all."""
    worst = []
    for what, tensors in expected.items():
        if strange := sorted(found[what].keys() ^ tensors.keys()):
            why = "is missing" if strange[0] in tensors else "is none of the plain model's"
            return Finding(what, f"{strange[0]}, which {why}")
        worst.append(max(_errors(what, found[what], tensors), key=lambda finding: finding.error))
        if worst[-1].error > bound:
            return worst[-1]
    return max(worst, key=lambda finding: finding.error)


def _errors(what: str, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> Iterator[Finding]:
    floor = FLOOR * math.hypot(*(tensor.norm().item() for tensor in expected.values()))
    for name, tensor in expected.items():
        if what == INITIAL:  # a function of the job alone: bit for bit
            yield Finding(what, name, 0.0 if torch.equal(found[name], tensor) else math.inf)
            continue
        error = (found[name].double() - tensor.double()).norm().item() / max(tensor.norm().item(), floor, 1e-300)
        yield Finding(what, name, math.inf if math.isnan(error) else error)
