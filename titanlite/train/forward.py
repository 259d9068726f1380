"""The forward pass of this rank's parts of a model, on any mesh, and without one."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlite.data.loader import MicroBatch
from titanlite.parallel.build import Context
from titanlite.parallel.context_parallel import own_positions, sequence_multiple
from titanlite.parallel.pipeline_parallel import Loss, Pipeline


@dataclass
class Forward:
    """The parts of a model on this rank, and what running them takes; by default in one process."""

    parts: Sequence[nn.Module]
    device: torch.device
    loss_chunks: int = 1
    own_positions: Callable[[int], Tensor | None] = lambda length: None
    """The positions of this rank's tokens in a sequence of a length; None for all."""
    multiple: int = 1
    """Sequences are padded to a multiple of this length."""
    loss_ranks: dist.ProcessGroup | None = None
    """The ranks that have a part of the loss."""
    sequence_ranks: dist.ProcessGroup | None = None
    """The ranks that have the tokens of a sequence together, under context parallel."""
    pipeline: Pipeline | None = None
    """Runs several parts."""

    def take(self, batch: MicroBatch) -> MicroBatch:
        """Return the batch on the device, with this rank's tokens as its own."""
        return batch.to(self.device, self.own_positions(batch.rows.size(-1)))

    def run(self, batch: MicroBatch, last: Loss) -> Tensor | None:
        """Return the result of `last`, called with the model, the batch and its tokens.

        In a pipeline it is called with the last stage, the batch and hidden states; None elsewhere.
        """
        if self.pipeline:
            return self.pipeline.forward(batch, last)
        return last(self.parts[0], batch, batch.tokens)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Switch dropout and gradients off."""
        model = nn.ModuleList(self.parts)
        model.eval()
        with torch.no_grad():
            yield
        model.train()


def build_forward(
    context: Context, parts: Sequence[nn.Module], rank: int, pipeline: Pipeline | None
) -> Forward:
    """Return the forward pass of a job on this rank."""
    job = context.job
    sequence_ranks = None
    if job.layout.cp > 1:
        sequence_ranks = context.mesh.world.get_group("cp")
    return Forward(
        parts,
        context.device,
        job.config.training.loss_chunks,
        cache(partial(own_positions, job, rank, context.device)),
        sequence_multiple(job),
        context.mesh.loss,
        sequence_ranks,
        pipeline,
    )
