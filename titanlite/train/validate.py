"""The loss on held-out data: what one process would compute, on any mesh; every rank takes part in every batch."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from titanlite.data.loader import BatchPrefetcher, Loader, MicroBatch
from titanlite.data.stream import StreamLoader
from titanlite.errors import RunFailed
from titanlite.parallel.pipeline_parallel import Pipeline
from titanlite.runtime.page import OWN_PAGE
from titanlite.train.chunked_loss import model_loss
from titanlite.train.loss import count_valid


class Abandoned(Exception):
    """A request to stop came before the end of the data."""


def validation_loss(
    parts: Sequence[nn.Module],
    loader: Loader,
    device: torch.device,
    group: dist.ProcessGroup | None,
    chunks: int = 1,
    positions: torch.Tensor | None = None,
    pipeline: Pipeline | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> float:
    """Return the mean token loss over a loader's batches, which are the same every time.

    `positions` are this rank's in each sequence, None for all; `pipeline` runs several parts. All ranks call
    `should_stop` in every 8th batch; where it is true, all raise Abandoned.

    The set need not divide among the ranks: windows beyond its end have no valid token, so that all ranks run out
    together. The length of a stream is unknown, so that each of its batches asks whether any rank has tokens left.
    """

    def last_loss(stage: nn.Module, batch: MicroBatch, hidden: torch.Tensor) -> torch.Tensor:
        return model_loss(stage, batch, chunks, hidden=hidden)

    batches = BatchPrefetcher(loader, device)
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    nn.ModuleList(parts).eval()
    with torch.no_grad():
        abandoned = False
        for number, batch in enumerate(batches, start=1):
            OWN_PAGE.enter("validation")  # each batch is progress: a long validation is no hang
            if should_stop and number % 8 == 0 and (abandoned := should_stop()):
                break
            batch = batch.to(device, positions)
            valid = count_valid(batch.labels)
            if isinstance(loader, StreamLoader):
                valid_anywhere = valid.clone()
                dist.all_reduce(valid_anywhere, group=group)
                if not valid_anywhere.item():
                    break
            loss = pipeline.forward(batch, last_loss) if pipeline else model_loss(parts[0], batch, chunks)
            if loss is not None:  # only a pipeline's last stage has one
                totals += torch.stack([loss.double(), valid])
    nn.ModuleList(parts).train()
    batches.close()
    if abandoned:
        raise Abandoned
    if group:  # none in one process
        dist.all_reduce(totals, group=group)
    total, tokens = totals.tolist()
    if not tokens:
        raise RunFailed("validation: the data has no token to predict")
    return total / tokens
