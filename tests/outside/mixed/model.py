"""Experts of two matrices with a squared ReLU, routed by titanlite's layers."""

import torch
from torch import Tensor, nn

from mixed import MixedConfig
from titanlite.models.common.attention import RotaryAttention
from titanlite.models.common.decoder import Decoder
from titanlite.models.common.moe import MoE, Router, grouped_product
from titanlite.models.common.rope import Rope


class Dense(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, hidden, bias=False), nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu() ** 2)


class Experts(nn.Module):
    def __init__(self, c: MixedConfig) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(c.experts, c.expert_dim, c.dim))
        self.down = nn.Parameter(torch.empty(c.experts, c.dim, c.expert_dim))

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        return grouped_product(
            grouped_product(tokens, self.up, counts).relu() ** 2, self.down, counts
        )


class Block(nn.Module):
    def __init__(self, c: MixedConfig, is_dense: bool) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = (
            nn.RMSNorm(c.dim, eps=1e-5),
            nn.RMSNorm(c.dim, eps=1e-5),
        )
        self.attention = RotaryAttention(c.dim, c.n_heads, c.n_heads, c.dim // c.n_heads)
        if is_dense:
            self.dense = Dense(c.dim, 2 * c.dim)
        else:
            router = Router(c.dim, c.experts, c.top_k, score="sigmoid", balance=c.balance)
            self.mixture = MoE(router, Experts(c), Dense(c.dim, c.expert_dim))

    def forward(self, h: Tensor, rotations: Tensor, mask: Tensor | None) -> Tensor:
        h = h + self.attention(self.attention_norm(h), rotations, mask)
        return h + (self.dense if hasattr(self, "dense") else self.mixture)(self.ffn_norm(h))


class Mixed(Decoder):
    def __init__(self, c: MixedConfig, positions: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(c.vocab_size, c.dim)
        self.rope = Rope(c.dim // c.n_heads, positions, 10000.0)
        self.layers = nn.ModuleDict({str(i): Block(c, is_dense=i == 0) for i in range(c.n_layers)})
        self.norm = nn.RMSNorm(c.dim, eps=1e-5)
        self.output = nn.Linear(c.dim, c.vocab_size, bias=False)

    def block_inputs(self, positions: Tensor | None, length: int) -> tuple[Tensor, ...]:
        return (self.rope(positions, length),)
