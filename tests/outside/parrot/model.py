"""A model that predicts the next token from the running mean of those before it."""

from typing import Any

import torch
from torch import nn

from parrot import ParrotConfig


class Block(nn.Module):
    def __init__(self, c: ParrotConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(c.dim)
        self.up = nn.Linear(c.dim, 4 * c.dim)
        self.down = nn.Linear(4 * c.dim, c.dim)
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        x = self.norm(h)
        counts = torch.arange(1, x.size(1) + 1, device=x.device, dtype=x.dtype).unsqueeze(-1)
        mean = x.cumsum(dim=1) / counts
        return h + self.dropout(self.down(torch.relu(self.up(x + mean))))


class Parrot(nn.Module):
    block: type[nn.Module] = Block

    def __init__(self, c: Any, positions: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(c.vocab_size, c.dim)
        self.layers = nn.ModuleDict({str(i): self.block(c) for i in range(c.n_layers)})
        self.output = nn.Linear(c.dim, c.vocab_size, bias=False)

    def forward(self, tokens, positions=None, documents=None, head=None) -> torch.Tensor:
        h = self.tok_embeddings(tokens)
        for block in self.layers.values():
            h = block(h)
        return self.output(h) if head is None else head(h, self.output)
