"""GPT-2 as a plain single-device module."""

import torch
import torch.nn.functional as F
from torch import nn

from titanlite.models.common.attention import CausalAttention, Mask
from titanlite.models.common.decoder import Decoder
from titanlite.models.gpt2 import GPT2Config


class Attention(nn.Module):
    def __init__(self, c: GPT2Config) -> None:
        super().__init__()
        self.head_dim = c.head_dim
        self.wq = nn.Linear(c.dim, c.dim)
        self.wk = nn.Linear(c.dim, c.dim)
        self.wv = nn.Linear(c.dim, c.dim)
        self.wo = nn.Linear(c.dim, c.dim)
        self.core = CausalAttention(c.dropout)
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, x: torch.Tensor, mask: Mask | None) -> torch.Tensor:
        def heads(projected: torch.Tensor) -> torch.Tensor:
            # -1: under tensor parallel a rank has some of the heads.
            return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

        values = self.core(heads(self.wq(x)), heads(self.wk(x)), heads(self.wv(x)), mask)
        return self.dropout(self.wo(values.transpose(1, 2).flatten(-2)))


class FeedForward(nn.Module):
    def __init__(self, c: GPT2Config) -> None:
        super().__init__()
        self.w1 = nn.Linear(c.dim, 4 * c.dim)
        self.w2 = nn.Linear(4 * c.dim, c.dim)
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.w2(F.gelu(self.w1(x), approximate="tanh")))


class Block(nn.Module):
    def __init__(self, c: GPT2Config) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(c.dim, eps=c.norm_eps)
        self.attention = Attention(c)
        self.ffn_norm = nn.LayerNorm(c.dim, eps=c.norm_eps)
        self.feed_forward = FeedForward(c)

    def forward(self, h: torch.Tensor, mask: Mask | None) -> torch.Tensor:
        h = h + self.attention(self.attention_norm(h), mask)
        return h + self.feed_forward(self.ffn_norm(h))


class GPT2(Decoder):
    def __init__(self, c: GPT2Config, positions: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(c.vocab_size, c.dim)
        # As many as the flavor has, whatever `positions` is, since the weights must fit runs of any
        # length.
        self.pos_embeddings = nn.Embedding(c.max_seq_len, c.dim)
        self.dropout = nn.Dropout(c.dropout)
        self.attention_dropout = c.dropout
        self.layers = nn.ModuleDict({str(i): Block(c) for i in range(c.n_layers)})
        self.norm = nn.LayerNorm(c.dim, eps=c.norm_eps)
        self.output = nn.Linear(c.dim, c.vocab_size, bias=False)
        self.output.weight = self.tok_embeddings.weight

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        if positions is None:
            positions = torch.arange(tokens.size(1), device=tokens.device)
        return self.dropout(super().embed(tokens, positions) + self.pos_embeddings(positions))
