"""The model on this rank as a step runs it: whole, or as stages of a pipeline."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from titanlite.config.layout import Layout
from titanlite.data.loader import MicroBatch
from titanlite.parallel.build import Context
from titanlite.parallel.context_parallel import TokenShare, token_share
from titanlite.parallel.pipeline_parallel import Loss, Pipeline
from titanlite.runtime.determinism import reseed
from titanlite.runtime.page import phase
from titanlite.train.loss import model_loss, token_loss_sum


class ModelRunner(Protocol):
    """Runs micro-batches through the parts of a model on this rank."""

    @property
    def parts(self) -> Sequence[nn.Module]:
        """The whole model, or this rank's pipeline stages in their order."""

    @property
    def share(self) -> TokenShare:
        """The tokens that this rank reads."""

    @property
    def has_loss(self) -> bool:
        """Whether this rank has losses, as the last stage of a pipeline has."""

    @property
    def source(self) -> int:
        """A rank to which `evaluate` returns a result."""

    @property
    def after_backward(self) -> Sequence[Callable[[], None]]:
        """Functions to call once all other sums of gradients are done."""

    @property
    def copies(self) -> Sequence[nn.Parameter]:
        """Parameters that another stage also has, and counts."""

    def gradients(
        self,
        step: int,
        micro_batches: Sequence[MicroBatch],
        valid_tokens: Callable[[], Tensor],
        before_last: Callable[[], None],
    ) -> Tensor:
        """Add the gradients of (sum of token losses / valid tokens).

        `before_last` is called before the last micro-batch, except in a pipeline, whose passes
        interleave. Return this rank's part of that loss, zero without losses.
        """

    def evaluate(self, batch: MicroBatch, last: Loss) -> Tensor | None:
        """Return the result of `last`, called with the model, the batch and its tokens.

        In a pipeline it is called with the last stage, the batch and hidden states; None elsewhere.
        """


@dataclass
class WholeModel:
    """A model that this rank runs whole, one micro-batch after the other."""

    model: nn.Module
    share: TokenShare
    loss: Loss = model_loss
    reseed: Callable[[int, int], None] = lambda step, micro_batch: None
    deferred: bool | Literal["replicas"] = False
    """parallelism.defer_gradient_sync"""
    has_loss = True
    source = 0
    copies: Sequence[nn.Parameter] = ()
    after_backward: Sequence[Callable[[], None]] = ()

    @property
    def parts(self) -> list[nn.Module]:
        return [self.model]

    def gradients(
        self,
        step: int,
        micro_batches: Sequence[MicroBatch],
        valid_tokens: Callable[[], Tensor],
        before_last: Callable[[], None],
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.share.device)
        for number, batch in enumerate(micro_batches):
            is_last = number == len(micro_batches) - 1
            self._sync(is_last)
            if is_last:
                before_last()
            self.reseed(step, number)
            with phase("forward"):
                loss = self.loss(self.model, batch, batch.tokens) / valid_tokens()
            with phase("backward"):
                loss.backward()
            total += loss.detach()
        return total

    def _sync(self, is_last: bool) -> None:
        """Let FSDP2 sum gradients after the last micro-batch only, if sums are deferred."""
        if not self.deferred or not isinstance(self.model, FSDPModule):
            return
        if self.deferred == "replicas":
            self.model.set_requires_all_reduce(is_last)
        else:
            self.model.set_requires_gradient_sync(is_last)

    def evaluate(self, batch: MicroBatch, last: Loss) -> Tensor | None:
        return last(self.model, batch, batch.tokens)


def build_runner(context: Context, parts: Sequence[nn.Module], seed: int, rank: int) -> ModelRunner:
    """Return the runner of a job's model on this rank."""
    config = context.job.config
    token_loss = token_loss_sum
    if config.compile.enable and "loss" in config.compile.components:
        token_loss = torch.compile(token_loss_sum, backend=config.compile.backend)
    loss = partial(model_loss, chunks=config.training.loss_chunks, token_loss=token_loss)
    coordinates = _dropout_coordinates(context.job.layout, rank)

    def reseed_dropout(step: int, micro_batch: int, *stage: int) -> None:
        reseed(seed, step, micro_batch, *coordinates, *stage)

    share = token_share(context, rank)
    if context.job.layout.pp > 1:
        return Pipeline(context, parts, share, loss, reseed_dropout)
    deferred = config.parallelism.defer_gradient_sync
    return WholeModel(parts[0], share, loss, reseed_dropout, deferred)


def _dropout_coordinates(layout: Layout, rank: int) -> list[int]:
    """Return the coordinates of a rank that determine its dropout.

    cp and the stage of a pipeline are among them only if used, so that runs without them resume bit
    for bit.
    """
    own = layout.coordinates(rank)
    coordinates = [layout.batch_coordinate(rank), own["tp"]]
    if layout.cp > 1:
        coordinates.append(own["cp"])
    return coordinates


def take(runner: ModelRunner, batch: MicroBatch) -> MicroBatch:
    """Return the batch on the device, with this rank's share of the tokens marked."""
    share = runner.share
    return batch.to(share.device, share.own_positions(batch.rows.size(-1)))


@contextmanager
def evaluating(runner: ModelRunner) -> Iterator[None]:
    """Switch dropout and gradients off."""
    model = nn.ModuleList(runner.parts)
    model.eval()
    with torch.no_grad():
        yield
    model.train()
