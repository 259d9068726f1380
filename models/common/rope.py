"""Rotary position embedding over adjacent pairs."""

import math

import torch
from torch import Tensor, nn

from titanlite.models.common import RopeScaling


class Rope(nn.Module):
    """Tables of cosines and sines in float32, computed by `reset_buffers` on the device and not saved."""

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, positions: int, theta: float, scaling: RopeScaling | None = None) -> None:
        super().__init__()
        self.head_dim, self.theta, self.scaling = head_dim, theta, scaling
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(positions, head_dim // 2, dtype=torch.float32), persistent=False)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        """Fill the tables, computing in float64 so that every device has the same float32 values."""
        pairs = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device=self.cos.device)
        frequencies = self.theta ** (-pairs / self.head_dim)
        if s := self.scaling:
            turns = frequencies * s.original_positions / (2 * math.pi)
            blend = ((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)).clamp(0, 1)
            frequencies = frequencies * (blend + (1 - blend) / s.factor)
        angles = torch.outer(torch.arange(self.cos.size(0), device=self.cos.device).double(), frequencies)
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())

    def forward(self, positions: Tensor | None, tokens: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines at positions (batch, tokens) with a head axis, or at 0 to tokens - 1."""
        if positions is None:
            return self.cos[:tokens], self.sin[:tokens]
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each adjacent pair of (batch, heads, tokens, head_dim), in float32 or wider."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    pairs = wide.unflatten(-1, (-1, 2))
    if torch.compiler.is_compiling():  # inductor generates no code for complex numbers
        a, b = pairs.unbind(-1)
        rotated = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1)
    else:
        turns = torch.complex(cos.to(wide.dtype), sin.to(wide.dtype))
        rotated = torch.view_as_real(torch.view_as_complex(pairs) * turns)
    return rotated.flatten(-2).to(x.dtype)
