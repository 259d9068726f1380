"""Help a run on fake GPUs (tests/gpu), with --model.package=on_fake_gpu.

The traces get the phases of a step, and at the end the allocator's peaks. Kernels compute nothing,
so that the host reads zeros: where it needs another value to go on, it gets that here, after the
wait for the zeros."""

import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import injured  # noqa: F401
import torch

from tests.gpu.marks import mark
from titanlite.parallel import expert_parallel
from titanlite.runtime.page import OwnPage
from titanlite.train import network, trainer


def mark_phases() -> None:
    stand_in = OwnPage.stand_in

    def marked(self: Any, phase: str) -> None:
        mark(f"{self.step} {self.sequence} {phase}")
        if phase == "end":
            mark(f"peak {torch.cuda.max_memory_allocated()} {torch.cuda.max_memory_reserved()}")
        stand_in(self, phase)

    mock.patch.object(OwnPage, "stand_in", marked).start()


def reading(method: str, value: Any, function: Callable, *arguments: Any) -> Any:
    """Call the function, in which this method of tensors on the device returns the value."""
    original = getattr(torch.Tensor, method)

    def read(tensor: torch.Tensor) -> Any:
        zeros = original(tensor)
        return value if tensor.is_cuda else zeros

    with mock.patch.object(torch.Tensor, method, read):
        return function(*arguments)


def choose_experts_evenly() -> None:
    dispatch = expert_parallel._dispatch

    def even(group: Any, *arguments: Any) -> torch.Tensor:
        tokens = arguments[-2]
        sizes = [len(tokens) // group.size()] * group.size()
        return reading("tolist", [sizes, sizes], dispatch, group, *arguments)

    mock.patch.object(expert_parallel, "_dispatch", even).start()


def find_tokens_to_validate() -> None:
    validate = trainer.validation_loss

    def validated(*arguments: Any) -> float | None:
        return reading("tolist", [1.0, 1.0], validate, *arguments)

    mock.patch.object(trainer, "validation_loss", validated).start()


def take_time_on_the_network() -> None:
    largest = network._largest

    def found(*arguments: Any) -> float:
        return reading("item", 1.0, largest, *arguments)

    mock.patch.object(network, "_largest", found).start()


def vote_for_known_shapes() -> None:
    """Since torch 2.14 the stages of a pipeline vote on how they find the shapes of what they
    send.
    """
    from torch.distributed.pipelining.schedules import _PipelineSchedule

    vote: Any = getattr(_PipelineSchedule, "_warmup_p2p", None)

    def voted(*arguments: Any) -> None:
        reading("item", 1, vote, *arguments)

    if vote:
        mock.patch.object(_PipelineSchedule, "_warmup_p2p", voted).start()


def begin() -> None:
    mark_phases()
    take_time_on_the_network()
    choose_experts_evenly()
    find_tokens_to_validate()
    vote_for_known_shapes()


def begin_when_shared(self: Any, *arguments: Any) -> None:
    share(self, *arguments)
    begin()


share = OwnPage.share
# A rank of a pool has no such variable.
if "RANK" in os.environ or torch.distributed.is_initialized():
    begin()
else:  # the launcher, from which ranks are forked
    mock.patch.object(OwnPage, "share", begin_when_shared).start()
