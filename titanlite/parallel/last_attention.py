"""Causal attention from the last tokens of a sequence, with a GPU's fastest kernel.

FlashAttention-2 aligns its causal mask to the last token. cuDNN's kernels, which take about half
its time on Hopper, align theirs to the first token, so they run twice: without a mask over the
earlier tokens, and causally over the last ones.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from titanlite.runtime.torch_private import (
    attend,
    attention_gradients,
    flash_from_last,
    prefers_cudnn,
)

TOKENS = 2
LARGEST_HEAD = 128
"""The largest head of cuDNN's backward kernels."""


def last_attention(device: torch.device) -> Callable[[Tensor, Tensor, Tensor, float], Tensor]:
    """Return this GPU's attention from the last tokens, in 16 bits."""
    if prefers_cudnn(device):
        return attend_in_two_parts
    return flash_from_last


def attend_in_two_parts(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """Attend causally from the last tokens, in two calls."""
    if dropout or q.size(-1) > LARGEST_HEAD:
        return flash_from_last(q, k, v, dropout)
    return _InTwoParts.apply(q, k, v)


class _InTwoParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        before = k.size(TOKENS) - q.size(TOKENS)
        earlier, lse_earlier, seeds_earlier = attend(q, k[:, :, :before], v[:, :, :before], False)
        own, lse_own, seeds_own = attend(q, k[:, :, before:], v[:, :, before:], True)
        # Each part is a softmax over its keys; logsumexp (lse) gives its share of the whole.
        share = torch.sigmoid(lse_own - lse_earlier)
        out = (earlier * (1 - share) + own * share).to(q.dtype)
        lse = torch.logaddexp(lse_earlier, lse_own)
        ctx.save_for_backward(q, k, v, out, lse, *seeds_earlier, *seeds_own)
        # Until torch 2.14 is the minimum: 2.11's compiler loses the gradient where `to` has nothing
        # to convert.
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        q, k, v, out, lse, *seeds = ctx.saved_tensors
        before = k.size(TOKENS) - q.size(TOKENS)
        count = len(seeds) // 2
        # With the whole output and logsumexp, each part's gradients are those of the whole.
        of_earlier = attention_gradients(
            grad, (q, k[:, :, :before], v[:, :, :before]), (out, lse, seeds[:count]), False
        )
        of_own = attention_gradients(
            grad, (q, k[:, :, before:], v[:, :, before:]), (out, lse, seeds[count:]), True
        )
        grad_k, grad_v = (torch.cat((of_earlier[n], of_own[n]), TOKENS) for n in (1, 2))
        return of_earlier[0] + of_own[0], grad_k, grad_v
