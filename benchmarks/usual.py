"""Llama and Qwen 3 in their usual form, as in other trainers, which titanlite's own models are
compared with.

Only the names of their parameters are titanlite's, so that both models get the same values. The
modules use complex rotary positions, F.scaled_dot_product_attention, nn.RMSNorm and SwiGLU.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402

SEQ, BATCH = 256, 4
SIZES = {"dim": 256, "n_layers": 4, "n_heads": 8, "n_kv_heads": 4, "hidden_dim": 1024}
WARM_UP = 5


def rotations(head_dim: int, positions: int, theta: float) -> Tensor:
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    angles = torch.outer(torch.arange(positions).float(), frequencies)
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x: Tensor, rotations: Tensor) -> Tensor:
    """Rotate pairs of (batch, tokens, heads, head_dim)."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotations[:, None]).flatten(3).type_as(x)


class Attention(nn.Module):
    def __init__(self, c: Any, head_norms: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = c.n_heads, c.n_kv_heads, c.head_dim
        self.wq = nn.Linear(c.dim, c.n_heads * c.head_dim, bias=False)
        self.wk = nn.Linear(c.dim, c.n_kv_heads * c.head_dim, bias=False)
        self.wv = nn.Linear(c.dim, c.n_kv_heads * c.head_dim, bias=False)
        self.wo = nn.Linear(c.n_heads * c.head_dim, c.dim, bias=False)
        self.q_norm = nn.RMSNorm(c.head_dim, c.norm_eps) if head_norms else nn.Identity()
        self.k_norm = nn.RMSNorm(c.head_dim, c.norm_eps) if head_norms else nn.Identity()

    def forward(self, x: Tensor, rotations: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q = self.wq(x).view(batch, tokens, self.heads, self.head_dim)
        k = self.wk(x).view(batch, tokens, self.kv_heads, self.head_dim)
        v = self.wv(x).view(batch, tokens, self.kv_heads, self.head_dim)
        q, k = rotate(self.q_norm(q), rotations), rotate(self.k_norm(k), rotations)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        values = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.heads > self.kv_heads
        )
        return self.wo(values.transpose(1, 2).reshape(batch, tokens, -1))


class FeedForward(nn.Module):
    def __init__(self, c: Any) -> None:
        super().__init__()
        self.w1 = nn.Linear(c.dim, c.hidden_dim, bias=False)
        self.w2 = nn.Linear(c.hidden_dim, c.dim, bias=False)
        self.w3 = nn.Linear(c.dim, c.hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, c: Any, head_norms: bool) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(c.dim, c.norm_eps)
        self.attention = Attention(c, head_norms)
        self.ffn_norm = nn.RMSNorm(c.dim, c.norm_eps)
        self.feed_forward = FeedForward(c)

    def forward(self, h: Tensor, rotations: Tensor) -> Tensor:
        h = h + self.attention(self.attention_norm(h), rotations)
        return h + self.feed_forward(self.ffn_norm(h))


class Usual(nn.Module):
    """Llama 3, or Qwen 3 with `head_norms`; without scaled wavelengths, ties and experts."""

    rotations: Tensor

    def __init__(self, c: Any, positions: int, head_norms: bool) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(c.vocab_size, c.dim)
        self.layers = nn.ModuleDict({str(i): Block(c, head_norms) for i in range(c.n_layers)})
        self.norm = nn.RMSNorm(c.dim, c.norm_eps)
        self.output = nn.Linear(c.dim, c.vocab_size, bias=False)
        self.register_buffer(
            "rotations", rotations(c.head_dim, positions, c.rope_theta), persistent=False
        )

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tok_embeddings(tokens)
        for block in self.layers.values():
            h = block(h, self.rotations[: tokens.size(1)])
        return self.output(self.norm(h))


def build(name: str) -> Any:
    """Return a function that builds this model from a flavor and a number of positions."""
    return lambda flavor, positions: Usual(flavor, positions, head_norms=name == "qwen3")
