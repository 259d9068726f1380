"""Loss on held-out data: equal to what one process would find, and every rank takes part in every batch."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

from titanlite.data.loader import Ahead
from titanlite.loss import count_valid, token_loss_sum


def validation_loss(
    model: nn.Module, loader: StatefulDataLoader, device: torch.device, group: dist.ProcessGroup
) -> float:
    """Mean token loss over a loader's batches, the same batches every time.

    The set need not divide: windows beyond its end hold no valid token, so no rank ever runs out before another.
    """
    batches = Ahead(loader, device)
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    model.eval()
    with torch.no_grad():
        for batch in batches:
            batch = batch.to(device)
            logits = model(batch.tokens, batch.positions, batch.documents)
            totals[0] += token_loss_sum(logits, batch.labels)
            totals[1] += count_valid(batch.labels)
    model.train()
    batches.close()
    dist.all_reduce(totals, group=group)
    loss, tokens = totals.tolist()
    return loss / tokens
