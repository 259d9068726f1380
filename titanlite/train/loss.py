"""The loss: the sum of token losses over the valid tokens of the whole global batch.

The divisor is the same on every rank and for every micro-batch, so gradients only need summing, whatever the mesh,
the accumulation, or how the valid tokens are spread.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial

from titanlite.data.packing import IGNORED


def token_loss_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of the cross-entropy over the valid tokens, computed in float32 or wider."""
    if isinstance(logits, DTensor):  # from tensor parallel
        if any(placement.is_shard() for placement in logits.placements):
            return _split_loss_sum(logits, labels)
        logits = logits.to_local()
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def _split_loss_sum(logits: DTensor, labels: torch.Tensor) -> torch.Tensor:
    """The same where every rank of a mesh holds a slice of the vocabulary; the logits are never gathered."""
    (rank,) = logits.device_mesh.get_coordinate() or ()

    def over_ranks(part: torch.Tensor, operation: str) -> torch.Tensor:
        return DTensor.from_local(
            part.detach(), logits.device_mesh, (Partial(operation),), run_check=False
        ).full_tensor()

    local = logits.to_local()
    wide = local.to(torch.promote_types(local.dtype, torch.float32))
    first = rank * -(-logits.size(-1) // logits.device_mesh.size())
    valid = labels != IGNORED
    here = valid & (labels >= first) & (labels < first + wide.size(-1))
    at_label = wide.gather(-1, torch.where(here, labels - first, 0).unsqueeze(-1)).squeeze(-1) * here
    top = over_ranks(wide.amax(-1), "max")
    mass, of_label = over_ranks(torch.stack([(wide.detach() - top.unsqueeze(-1)).exp().sum(-1), at_label]), "sum")
    normalizer = top + mass.log()
    # The value, which all ranks agree on, has no gradient; the slope is added for its own, softmax minus one-hot,
    # which needs no communication.
    value = torch.where(valid, normalizer - of_label, 0.0).sum()
    slope = torch.where(valid, (wide - normalizer.unsqueeze(-1)).exp().sum(-1) - at_label, 0.0).sum()
    return value + (slope - slope.detach())


def count_valid(labels: torch.Tensor) -> torch.Tensor:
    """Valid tokens, counted on the device."""
    return (labels != IGNORED).sum()
