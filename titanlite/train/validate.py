"""The loss on held-out data: what one process would compute, on any mesh.

Every rank takes part in every batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from titanlite.config.job import Job
from titanlite.data.loader import BatchPrefetcher, Loader
from titanlite.data.stream import StreamLoader
from titanlite.errors import RunFailed
from titanlite.runtime.page import OWN_PAGE
from titanlite.train.forward import ModelRunner, evaluating, take
from titanlite.train.loss import count_valid, model_loss


@dataclass(frozen=True)
class Cost:
    """What a validation reads."""

    batches: int = 0
    """Batches of each rank."""
    windows: int = 0
    tokens: int = 0
    steps: float = 0.0
    """Training steps of the same work: a forward pass is a third of a step."""
    between: int = 0
    """Tokens trained on from one validation to the next."""

    @classmethod
    def of(cls, job: Job, loader: Any) -> "Cost":
        settings = job.config.validation
        training = job.config.training
        unit = settings.local_batch_size * job.batch.data_parallel
        step = job.batch.total * training.seq_len
        between = min(settings.freq, training.steps) * step
        if isinstance(loader, StreamLoader):
            assert loader.steps, "the config rules refuse a stream without validation.steps"
            batches = loader.steps
            windows = batches * unit
        else:
            batches = loader.batch_sampler.steps
            windows = min(loader.dataset.samples, batches * unit)
        tokens = windows * job.validation_seq_len
        return cls(batches, windows, tokens, tokens / step / 3, between)

    def left(self, step: int, job: Job) -> int:
        """Return how many validations are left, starting with this step's."""
        freq = job.config.validation.freq
        last = job.config.training.steps
        return last // freq - (step - 1) // freq + (last % freq > 0)


def validation_loss(
    runner: ModelRunner,
    loader: Loader,
    chunks: int,
    should_stop: Callable[[], bool] | None = None,
    show: Callable[[int], object] = id,
) -> float | None:
    """Return the mean token loss over a loader's batches, which are the same every time.

    Sequences are cut into `chunks`. All ranks call `should_stop` every 8th batch; once it is true,
    the result is None. `show` is called with the number of each batch.

    The data need not divide evenly among the ranks: windows beyond its end have no valid token, so
    that all ranks run out together.
    """
    share = runner.share
    last_loss = partial(model_loss, chunks=chunks)
    batches = BatchPrefetcher(loader, share.device)
    totals = torch.zeros(2, dtype=torch.float64, device=share.device)
    abandoned = False
    with evaluating(runner):
        for number, batch in enumerate(batches, start=1):
            OWN_PAGE.enter("validation")  # each batch is progress, so a long validation is no hang
            if should_stop and number % 8 == 0 and should_stop():
                abandoned = True
                break
            show(number)
            batch = take(runner, batch)
            valid = count_valid(batch.labels)
            loss = runner.evaluate(batch, last_loss)
            if loss is not None:  # in a pipeline only the last stage has one
                totals += torch.stack([loss.double(), valid])
    batches.close()
    if abandoned:
        return None
    if share.loss_ranks:  # none in one process
        dist.all_reduce(totals, group=share.loss_ranks)
    total, tokens = totals.tolist()
    if not tokens:
        raise RunFailed("validation: the data has no token to predict")
    return total / tokens
