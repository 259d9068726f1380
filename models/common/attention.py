"""The core of causal attention, in one module that context parallel or another kernel can replace."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention


class CausalAttention(nn.Module):
    """Scaled dot-product attention of (batch, heads, tokens, head_dim); kv may have fewer heads than q."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout  # the probability that training drops one token's attention to another

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        """Attend; with `documents` (batch, tokens), a token sees only tokens of the same document number."""
        grouped = q.size(1) != k.size(1)
        dropout = self.dropout if self.training else 0.0
        if documents is None:
            return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=grouped)
        if q.is_cuda and torch.compiler.is_compiling() and not dropout:
            return flex_document_attention(q, k, v, documents)  # fused, and skips blocks between documents
        tokens = q.size(2)
        causal = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).tril()
        mask = causal & (documents[:, None, :, None] == documents[:, None, None, :])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, enable_gqa=grouped)


def flex_document_attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
    """Attend within documents by FlexAttention, which is slow unless compiled and has no backward pass on a CPU."""

    def is_visible(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (documents[batch, i] == documents[batch, j])

    tokens = q.size(2)
    mask = create_block_mask(is_visible, q.size(0), None, tokens, tokens, device=q.device)
    out = flex_attention(q, k, v, block_mask=mask, enable_gqa=q.size(1) != k.size(1))
    assert isinstance(out, Tensor)
    return out
