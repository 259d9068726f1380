"""Loss on held-out data: equal to what one process would find, and every rank takes part in every batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from titanlite.data.loader import BatchPrefetcher, Loader
from titanlite.data.stream import StreamLoader
from titanlite.errors import UserError
from titanlite.train.chunked_loss import model_loss
from titanlite.train.loss import count_valid


def validation_loss(
    parts: Sequence[nn.Module], loader: Loader, device: torch.device, group: dist.ProcessGroup, chunks: int = 1
) -> float:
    """Mean token loss over a loader's batches, the same batches every time.

    The set need not divide: windows beyond its end hold no valid token, so no rank ever runs out before another. Of a
    stream nobody knows the end, so it is asked for in every batch.
    """
    (model,) = parts  # a pipeline needs its schedule here
    batches = BatchPrefetcher(loader, device)
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    model.eval()
    with torch.no_grad():
        for batch in batches:
            batch = batch.to(device)
            valid = count_valid(batch.labels)
            if isinstance(loader, StreamLoader):
                anywhere = valid.clone()
                dist.all_reduce(anywhere, group=group)
                if not anywhere.item():
                    break
            totals[0] += model_loss(model, batch, chunks)
            totals[1] += valid
    model.train()
    batches.close()
    dist.all_reduce(totals, group=group)
    loss, tokens = totals.tolist()
    if not tokens:
        raise UserError("validation: there is not one token to predict in the data")
    return loss / tokens
