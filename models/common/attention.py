"""The core of causal attention, in one module that context parallel or another kernel can replace, and its mask."""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

Mask = Tensor | BlockMask
"""Which tokens see which: what is added to the scores (batch, 1, tokens, tokens), or FlexAttention's blocks."""
FLEX_DEVICES = ("cuda",)  # a CPU has no backward pass of FlexAttention
_compiled = cache(torch.compile)  # late, since it takes seconds to import


class CausalAttention(nn.Module):
    """Scaled dot-product attention of (batch, heads, tokens, head_dim); kv may have fewer heads than q."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout  # the probability that training drops one token's attention to another

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None) -> Tensor:
        """Attend causally, or with a mask from `document_mask` within documents."""
        grouped = q.size(1) != k.size(1)
        dropout = self.dropout if self.training else 0.0
        if isinstance(mask, BlockMask):
            assert not dropout, "FlexAttention has no dropout: give document_mask its probability"
            # Outside of a compiled block it is compiled by itself: uncompiled it would keep all scores.
            attend: Any = flex_attention if torch.compiler.is_compiling() else _compiled(flex_attention)
            return attend(q, k, v, block_mask=mask, enable_gqa=grouped)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, enable_gqa=grouped
        )


def document_mask(documents: Tensor, dtype: torch.dtype, dropout: float = 0.0) -> Mask:
    """Return the mask with which a token sees only earlier tokens of the same number in `documents` (batch, tokens).

    A model makes it once per micro-batch, outside of its blocks: each block would make it again, and a compiled block
    that is recomputed cannot make it. `dtype` is that of the hidden states. On a GPU it is a BlockMask, with which
    FlexAttention skips what lies between documents, unless attention has `dropout`, which FlexAttention lacks.
    """
    if documents.device.type in FLEX_DEVICES and not dropout:
        sizes = (len(documents), None, documents.size(1), documents.size(1))  # batch, heads, queries, keys
        return _compiled(create_block_mask)(
            lambda b, _, i, j: (i >= j) & (documents[b, i] == documents[b, j]), *sizes, device=documents.device
        )
    visible = (documents[:, None, :, None] == documents[:, None, None, :]).tril()
    # Not booleans: each layer would convert them, and keep the result for its backward pass.
    return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, -torch.inf)
