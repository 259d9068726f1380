"""The loss: the sum of token losses over the valid tokens of the whole global batch.

The divisor is the same on every rank and for every micro-batch, so that gradients only need
summing, whatever the mesh, the accumulation, or the spread of the valid tokens.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial

from titanlite.data.loader import MicroBatch
from titanlite.data.packing import IGNORED
from titanlite.errors import UserError
from titanlite.train.chunked_loss import loss_in_chunks


def token_loss_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the sum of the cross-entropy over the valid tokens, computed in float32 or wider."""
    if isinstance(logits, DTensor):  # from tensor parallel
        if any(placement.is_shard() for placement in logits.placements):
            return _sharded_loss_sum(logits, labels)
        logits = logits.to_local()
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )


TokenLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Sums the loss over tokens: of logits (batch, tokens, vocabulary) and labels (batch, tokens)."""


def model_loss(
    model: nn.Module,
    batch: MicroBatch,
    inputs: torch.Tensor,
    chunks: int = 1,
    token_loss: TokenLoss = token_loss_sum,
    runs_again: Callable[[], bool] = lambda: False,
) -> torch.Tensor:
    """Return the sum of the token losses of a micro-batch, its sequences cut into `chunks`.

    `inputs` are its tokens; for the last stage of a pipeline hidden states, and it may run a
    backward pass in two halves: `runs_again()` is true during the first half.
    """
    if chunks == 1:
        return token_loss(model(inputs, batch.positions, batch.documents), batch.labels)
    head = partial(loss_in_chunks, batch.labels, chunks, token_loss, runs_again)
    total = model(inputs, batch.positions, batch.documents, head=head)
    if total.dim():
        raise UserError(
            f"training.loss_chunks = {chunks}: {type(model).__name__}.forward does not call its "
            "`head`"
        )
    return total


def _sharded_loss_sum(logits: DTensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the same sum where every rank holds a slice of the vocabulary.

    The logits are not gathered.

    (torch's loss_parallel() would have to enclose the backward pass as well.)
    """
    (rank,) = logits.device_mesh.get_coordinate() or ()

    def all_reduce(values: torch.Tensor, operation: str) -> torch.Tensor:
        placements = (Partial(operation),)
        summed = DTensor.from_local(
            values.detach(), logits.device_mesh, placements, run_check=False
        )
        return summed.full_tensor()

    local = logits.to_local()
    local = local.to(torch.promote_types(local.dtype, torch.float32))
    first = rank * -(-logits.size(-1) // logits.device_mesh.size())
    valid = labels != IGNORED
    is_local = valid & (labels >= first) & (labels < first + local.size(-1))
    index = torch.where(is_local, labels - first, 0).unsqueeze(-1)
    label_logit = local.gather(-1, index).squeeze(-1) * is_local
    top = all_reduce(local.amax(-1), "max")
    sum_exp = (local.detach() - top.unsqueeze(-1)).exp().sum(-1)
    sum_exp, full_label_logit = all_reduce(torch.stack([sum_exp, label_logit]), "sum")
    log_sum_exp = top + sum_exp.log()
    # The value is equal on all ranks and has no gradient. `slope` adds the gradient of this rank's
    # slice, softmax minus one-hot, which needs no communication.
    value = torch.where(valid, log_sum_exp - full_label_logit, 0.0).sum()
    softmax_sum = (local - log_sum_exp.unsqueeze(-1)).exp().sum(-1)
    slope = torch.where(valid, softmax_sum - label_logit, 0.0).sum()
    return value + (slope - slope.detach())


def count_valid(labels: torch.Tensor) -> torch.Tensor:
    """Count the valid tokens, on the device."""
    return (labels != IGNORED).sum()
