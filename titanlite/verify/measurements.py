"""The measurements of a few steps of a model, and their comparison.

The error of a tensor is ||actual - expected|| / ||expected||, of the full tensor. If ||expected||
is less than FLOOR times the norm of all tensors of its kind, that replaces it: a tensor that is
zero up to rounding, such as a key bias's gradient under softmax, has the error of the terms
summed."""

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
from titanlite.errors import counted
from titanlite.parallel.expert_parallel import routers
from titanlite.registry import get_optimizer
from titanlite.verify.table import SAMPLES, STEPS

BOUNDS = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 1e-1, "pure bf16": 1e-1}
"""The largest error of a row. bfloat16 mixed precision is compared with float32: in the models
here its 8 bits cause errors of up to 5e-2, on one rank as on many, while a dropped or doubled sum
causes 5e-1 and more. If the weights are bfloat16, the reference's are too."""
LOSS_BOUNDS = BOUNDS | {"bfloat16": 5e-4}
"""The largest error of the loss, an average over tokens: computed in float32 it has an error of
6e-5, in bfloat16 of 1e-3.
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

    SGD steps tensor by tensor and without decay: for each new operation DTensor searches how to
    split it, which takes seconds on three mesh dimensions, most of all for lists of tensors.
    AdamW's step is on lists, with decay.

    AdamW divides by |gradient| + eps. With the usual 1e-8, a gradient that is zero except for
    rounding, such as a key bias's under softmax, moves its weight by the whole learning rate, in
    the direction of the rounding error; 1e-3, about the size of the gradients here, keeps errors
    about as large as they were."""
    settings: dict[str, Any] = {"name": name, "eps": 1e-3}
    if name == "SGD":
        settings |= {"implementation": "for-loop", "weight_decay": 0.0}
    if not get_optimizer(name, config.model.package).elementwise:
        settings["state_on"] = "device"
    return config.model_copy(update={"optimizer": config.optimizer.model_copy(update=settings)})


def steps_of(config: JobConfig) -> dict[str, int]:
    """Return the optimizers of a row with their steps."""
    if config.training.dtype != "float64":
        return {"SGD": 1, "AdamW": 3}
    own = config.optimizer.name
    if own in STEPS:
        return STEPS
    return {"SGD": 1, own: 3}


def after_steps(optimizer: str, steps: int) -> str:
    """Return the kind of the weights after an optimizer's steps."""
    return f"after {counted(steps, f'{optimizer} step')}:"


def ragged_batch(vocab_size: int, tokens: int, kind: str = "") -> MicroBatch:
    """Return SAMPLES samples of `tokens` tokens, with some labels ignored, in the first half all.

    In "one slice", no token is in the vocabulary slice of the second of two tensor-parallel ranks;
    with "documents" each sample has three documents.
    """
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
    """Return the lengths of the documents in a sample; the second of three spans the middle."""
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
    """Return the counts of a step's routers; `add` adds other ranks' counts in place."""
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
    """Return the worst mismatch of the first kind that exceeds the bound (later kinds follow from
    it), or else the worst of all.

    `owns(name)` tells whether this rank should have a tensor; without pipeline parallel it should
    have all.
    """
    worst: Mismatch = (-1.0, "")
    for what, tensors in expected.items():
        names = {*tensors}
        if what not in (NORM, LOSS):
            names = {*filter(owns, tensors)}
        unmatched = sorted(actual[what].keys() ^ names)
        if unmatched:
            why = "is not in the plain model"
            if unmatched[0] in names:
                why = "is missing"
            elif unmatched[0] in tensors:
                why = "belongs to another stage"
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
        if what == INITIAL:  # depends on the job, not on the mesh: must match bit for bit
            error = math.inf
            if torch.equal(tensor, reference.to(tensor.dtype)):
                error = 0.0
        else:
            size = max(reference.norm().item(), floor, 1e-300)
            error = (tensor.double() - reference.double()).norm().item() / size
        if math.isnan(error):
            error = math.inf
        yield error, name
