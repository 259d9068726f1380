"""The measurements of a few steps of a model, and their comparison.

The error of a tensor is ||actual - expected|| / ||expected||, of the full tensor. Where
||expected|| is less than FLOOR of the norm of all tensors of its kind, that takes its place: a
tensor that is zero up to rounding, such as a key bias's gradient under softmax, has the error of
the terms that were summed."""

import math
from collections.abc import Callable, Iterator, Mapping
from operator import itemgetter
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from titanlite.config.schema import JobConfig
from titanlite.data.loader import MicroBatch
from titanlite.data.packing import IGNORED
from titanlite.parallel.expert_parallel import routers
from titanlite.verify.table import SAMPLES, STEPS

BOUNDS = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 1e-1, "pure bf16": 1e-1}
"""Largest error of a row. bfloat16 mixed precision is compared with float32: by trial its 8 bits
err by up to 5e-2 in the models here, on one rank as on many, where a sum that is dropped or doubled
errs by 5e-1 and more. Where weights themselves are bfloat16, the reference's are too."""
LOSS_BOUNDS = BOUNDS | {"bfloat16": 5e-4}
"""Of the loss, an average over tokens, with an error of 6e-5 where it is computed in float32 and
1e-3 in bfloat16.
"""
FLOOR = 1e-3
INITIAL = "initial value of"
GRADIENT = "gradient of"
NORM = "norm of all gradients"
LOSS = "loss"
CHOICES = "choices of experts in"
BALANCE = "loss of balance in"

Measured = dict[str, dict[str, torch.Tensor]]
"""Full tensors by kind and name."""


Mismatch = tuple[float, str]
"""The largest error of a row, infinite if it can't be measured, and the kind and name of its
tensor.
"""


def with_optimizer(config: JobConfig, name: str) -> JobConfig:
    """Return the same config with another optimizer.

    SGD steps tensor by tensor and without decay: DTensor searches how each new operation is split,
    for seconds on three mesh dimensions, most of all for lists of tensors. AdamW's step is on
    lists, with decay.

    AdamW divides by |gradient| + eps. With the usual 1e-8, a gradient that is zero but for
    rounding, such as a key bias's under softmax, moves its weight by the whole learning rate, in
    the direction of the rounding; 1e-3, about the size of the gradients here, leaves errors about
    as large as they were."""
    plain = {}
    if name == "SGD":
        plain = {"implementation": "for-loop", "weight_decay": 0.0}
    settings = {"name": name, "eps": 1e-3, **plain}
    return config.model_copy(update={"optimizer": config.optimizer.model_copy(update=settings)})


def steps_of(config: JobConfig) -> dict[str, int]:
    """Return the optimizers of a row with their steps."""
    if config.training.dtype != "float64":
        return {"SGD": 1, "AdamW": 3}
    own = config.optimizer.name
    return STEPS if own in STEPS else {"SGD": 1, own: 3}


def after_steps(optimizer: str, steps: int) -> str:
    """Return the kind of the weights after an optimizer's steps."""
    return f"after {steps} {optimizer} step{'s' * (steps > 1)}:"


def ragged_batch(vocab_size: int, tokens: int, kind: str = "") -> MicroBatch:
    """Return SAMPLES samples of `tokens` tokens, some labels ignored, in the first half all of
    them.

    As "one slice", no token is in the slice of the vocabulary that the second of two
    tensor-parallel ranks has; with "documents" each sample has three."""
    generator = torch.Generator().manual_seed(7)
    text = torch.randint(vocab_size, (SAMPLES, tokens + 1), generator=generator)
    if kind == "one slice":
        text %= vocab_size // 2
    labels = text[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = IGNORED
    labels[: SAMPLES // 2] = IGNORED
    rows = [text[:, :-1], labels]
    if kind == "documents":
        lengths = lengths_of(tokens, kind)
        documents = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        positions = torch.cat([torch.arange(length) for length in lengths])
        rows += [documents.expand_as(labels), positions.expand_as(labels)]
    return MicroBatch(torch.stack(rows, dim=1))


def lengths_of(tokens: int, kind: str) -> list[int]:
    """Return the lengths of the documents in a sample; the second of three lies on both sides of
    the middle.
    """
    third = tokens // 3
    rest = tokens % 3
    if kind == "documents":
        return [third, third + rest // 2, third + rest - rest // 2]
    return [tokens]


def values(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: _full_copy(tensor) for name, tensor in tensors.items()}


def gradients(parameters: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    found = dict[str, torch.Tensor]()
    for name, p in parameters.items():
        if p.grad is not None:
            found[name] = _full_copy(p.grad)
    return found


def _full_copy(tensor: torch.Tensor) -> torch.Tensor:
    full = tensor
    if isinstance(tensor, DTensor):
        full = tensor.full_tensor()
    return full.detach().to("cpu", copy=True)


def routed(*parts: nn.Module, add: Callable[[torch.Tensor], Any] = lambda total: None) -> Measured:
    """Return the counts of a step's routers; `add` adds those of other ranks in place."""
    measured: Measured = {CHOICES: {}, BALANCE: {}}
    for name, router in routers(*parts).items():
        counts = router.counts.double()
        auxiliary = router.auxiliary.clone()
        add(counts)
        add(auxiliary)
        measured[CHOICES][name] = counts.cpu()
        measured[BALANCE][name] = auxiliary.cpu()
    return measured


def compare(
    actual: Measured, expected: Measured, precision: str, owns: Callable[[str], bool]
) -> Mismatch:
    """Return the worst of the first kind beyond the bound (later kinds follow from it), else the
    worst of all.

    `owns(name)`: should this rank have the tensor? Without pipeline parallel it should have all.
    """
    worst: Mismatch = (-1.0, "")
    for what, tensors in expected.items():
        names = set(filter(owns, tensors)) if what not in (NORM, LOSS) else tensors.keys()
        unmatched = sorted(actual[what].keys() ^ names)
        if unmatched:
            not_own = "is not in the plain model"
            if unmatched[0] in tensors:
                not_own = "belongs to another stage"
            why = "is missing" if unmatched[0] in names else not_own
            return math.inf, f"{what} {unmatched[0]}, which {why}"
        error, name = max(
            _errors(what, actual[what], tensors), key=itemgetter(0), default=(0.0, "")
        )
        if what == LOSS and LOSS_BOUNDS[precision] < error <= BOUNDS[precision]:
            return (
                math.inf,
                f"{what} differs by {error:.1e}, more than {LOSS_BOUNDS[precision]:.0e}",
            )
        found = error, f"{what} {name}".rstrip()
        if error > BOUNDS[precision]:
            return found
        worst = max(worst, found, key=itemgetter(0))
    return worst


def _errors(
    what: str, actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> Iterator[tuple[float, str]]:
    """Yield the error and name of each tensor."""
    floor = FLOOR * math.hypot(*(tensor.norm().item() for tensor in expected.values()))
    for name, tensor in actual.items():
        reference = expected[name]
        if what == INITIAL:  # a function of the job, not of the mesh: bit for bit
            error = math.inf
            if torch.equal(tensor, reference.to(tensor.dtype)):
                error = 0.0
        else:
            size = max(reference.norm().item(), floor, 1e-300)
            error = (tensor.double() - reference.double()).norm().item() / size
        yield math.inf if math.isnan(error) else error, name
