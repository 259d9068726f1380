"""Attention of values to normalized queries, and a learned scale of what each block adds."""

import torch
import torch.nn.functional as F
from parrot.model import Parrot
from torch import nn

from scaled import ScaledConfig


class Mix(nn.Module):
    def __init__(self, c: ScaledConfig) -> None:
        super().__init__()
        self.head_dim = c.dim // c.n_heads
        self.wq = nn.Linear(c.dim, c.dim, bias=False)
        self.wv = nn.Linear(c.dim, c.dim, bias=False)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=1e-5)
        self.temperature = nn.Parameter(torch.ones(self.head_dim))
        self.wo = nn.Linear(c.dim, c.dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.wq(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        v = self.wv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q = self.q_norm(q) * self.temperature
        return self.wo(
            F.scaled_dot_product_attention(q, q, v, is_causal=True).transpose(1, 2).flatten(-2)
        )


class Block(nn.Module):
    def __init__(self, c: ScaledConfig) -> None:
        super().__init__()
        self.mix = Mix(c)
        self.scale = nn.Parameter(torch.ones(c.dim))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + self.scale * self.mix(h)


class Scaled(Parrot):
    block = Block
