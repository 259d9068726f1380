"""The loss: the sum of token losses over the valid tokens of the whole global batch.

The divisor is the same on every rank and for every micro-batch, so gradients only need summing, whatever the mesh,
the accumulation, or how the valid tokens are spread.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

IGNORED = -100
"""The label of a token that does not count."""


def token_loss_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of the cross-entropy over the valid tokens, computed in float32 or wider."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def count_valid(labels: torch.Tensor) -> torch.Tensor:
    """Valid tokens, counted on the device."""
    return (labels != IGNORED).sum()
