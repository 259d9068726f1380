"""Causal attention: the layer, its core (which context parallel or another kernel can replace), and
the mask.
"""

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from titanlite.models.common.rope import rotate

Mask = Tensor | BlockMask
"""Which tokens see which: a term added to scores (batch, 1, tokens, tokens), or FlexAttention's."""
FLEX_DEVICES = ("cuda",)  # FlexAttention has no CPU backward
FLASH_HEADS = range(8, 257, 8)  # head sizes that flash attention supports
_compiled = cache(torch.compile)  # on first use, since importing the compiler takes seconds


class RotaryAttention(nn.Module):
    """Attention with rotary positions; several query heads may share a head of keys and values.

    With `norm_eps` each head's queries and keys are normalized.
    """

    def __init__(
        self, dim: int, heads: int, kv_heads: int, head_dim: int, norm_eps: float | None = None
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.wq = nn.Linear(dim, heads * head_dim, bias=False)
        self.wk = nn.Linear(dim, kv_heads * head_dim, bias=False)
        self.wv = nn.Linear(dim, kv_heads * head_dim, bias=False)
        self.wo = nn.Linear(heads * head_dim, dim, bias=False)
        self.q_norm = None
        self.k_norm = None
        if norm_eps is not None:
            self.q_norm = nn.RMSNorm(head_dim, norm_eps)
            self.k_norm = nn.RMSNorm(head_dim, norm_eps)
        self.core = CausalAttention()

    def forward(self, x: Tensor, rotations: Tensor, mask: Mask | None) -> Tensor:
        """Return the attention's output for the tokens of (batch, tokens, dim)."""
        heads = (-1, self.head_dim)  # -1: under tensor parallel a rank has some of the heads
        q = self.wq(x).unflatten(-1, heads)
        k = self.wk(x).unflatten(-1, heads)
        v = self.wv(x).unflatten(-1, heads)
        if self.q_norm and self.k_norm:
            q = self.q_norm(q)
            k = self.k_norm(k)
        # Transpose last; otherwise the norms and both backward passes would copy.
        q = rotate(q, rotations).transpose(1, 2)
        k = rotate(k, rotations).transpose(1, 2)
        values = self.core(q, k, v.transpose(1, 2), mask)
        return self.wo(values.transpose(1, 2).flatten(-2))


class CausalAttention(nn.Module):
    """Scaled dot-product attention of (batch, heads, tokens, head_dim).

    `k` and `v` may have fewer heads than `q`.
    """

    attend_last: Callable[[Tensor, Tensor, Tensor, float], Tensor] | None = None
    """A 16-bit kernel for causal attention from the last tokens, which context parallel sets if
    there is one.
    """

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout  # the probability of dropping one token's attention to another

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None) -> Tensor:
        """Attend causally, or with a mask from `document_mask`.

        `q` may hold only the last of the tokens of `k`.
        """
        # `not` forces a bool: the kernel does not accept a symbol, which a size becomes once models
        # of other sizes have been compiled in this process.
        grouped = not q.size(1) == k.size(1)  # noqa: SIM201
        dropout = self.dropout if self.training else 0.0
        if isinstance(mask, BlockMask):
            assert not dropout, "FlexAttention has no dropout: give document_mask its probability"
            attend: Any = flex_attention
            if not torch.compiler.is_compiling():  # uncompiled it would keep all scores
                attend = _compiled(flex_attention)
            return attend(q, k, v, block_mask=mask, enable_gqa=grouped)
        if mask is None and q.size(2) < k.size(2):
            if self.attend_last and q.element_size() == 2 and q.size(3) in FLASH_HEADS:
                return self.attend_last(q, k, v, dropout)
            # A graph computes its own, since the compiler ignores a cache and warns about it.
            make = causal_rows.__wrapped__ if torch.compiler.is_compiling() else causal_rows
            mask = make(q.size(2), k.size(2), q.dtype, q.device)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, enable_gqa=grouped
        )


@lru_cache(maxsize=4)  # for a rank's two chunks, in training and in validation
def causal_rows(last: int, tokens: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the causal mask of the last `last` of `tokens` tokens, shared by all layers, which
    keep it for their backward pass.
    """
    return torch.full((last, tokens), -torch.inf, dtype=dtype, device=device).triu(
        1 + tokens - last
    )


def document_mask(
    documents: Tensor, dtype: torch.dtype, dropout: float = 0.0, last: int = 0
) -> Mask:
    """Return the causal mask within each document; `documents` (batch, tokens) has their numbers.

    With `last` it is the mask of only the last `last` queries, and all keys.

    A model builds it once per micro-batch, outside its blocks: each block would build it again, and
    a compiled block that is recomputed can't build it. `dtype` is that of the hidden states. On a
    GPU it is a BlockMask, so that FlexAttention skips pairs of documents, unless attention has
    `dropout`, which FlexAttention lacks.
    """
    tokens = documents.size(1)
    first = 0
    if last:
        first = tokens - last
    if documents.device.type in FLEX_DEVICES and not dropout:

        def sees(b: Tensor, _: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (i + first >= j) & (documents[b, i + first] == documents[b, j])

        sizes = (len(documents), None, tokens - first, tokens)  # batch, heads, queries, keys
        return _compiled(create_block_mask)(sees, *sizes, device=documents.device)
    visible = (documents[:, None, first:, None] == documents[:, None, None, :]).tril(first)
    # Not booleans: each layer would convert them, and keep the result for its backward pass.
    return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, -torch.inf)
