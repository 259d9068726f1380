"""Rotary position embedding over adjacent pairs."""

import math

import torch
from torch import Tensor, nn

from titanlite.models.common import RopeScaling


class Rope(nn.Module):
    """A table of cosines and sines in float32, which `reset_buffers` computes; it is not saved."""

    rotations: Tensor  # (positions, 1, pairs, 2); 1 for the heads

    def __init__(
        self, head_dim: int, positions: int, theta: float, scaling: RopeScaling | None = None
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.theta = theta
        self.scaling = scaling
        rotations = torch.empty(positions, 1, head_dim // 2, 2, dtype=torch.float32)
        self.register_buffer("rotations", rotations, persistent=False)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        """Fill the table, computed in float64 so that every device has the same float32 values."""
        pairs = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device=self.rotations.device)
        frequencies = self.theta ** (-pairs / self.head_dim)
        s = self.scaling
        if s:
            cycles = frequencies * s.original_positions / (2 * math.pi)
            blend = ((cycles - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)).clamp(
                0, 1
            )
            frequencies = frequencies * (blend + (1 - blend) / s.factor)
        angles = torch.outer(
            torch.arange(len(self.rotations), device=pairs.device).double(), frequencies
        )
        self.rotations.copy_(torch.stack((angles.cos(), angles.sin()), dim=-1).unsqueeze(1))

    def forward(self, positions: Tensor | None, tokens: int) -> Tensor:
        """Return cosines and sines at positions (batch, tokens), or at 0 to tokens - 1."""
        if positions is None:
            return self.rotations[:tokens]
        return self.rotations[positions]


def rotate(x: Tensor, rotations: Tensor) -> Tensor:
    """Rotate each adjacent pair of (batch, tokens, heads, head_dim), in float32 or wider."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    pairs = wide.unflatten(-1, (-1, 2))
    rotations = rotations.to(wide.dtype)
    if torch.compiler.is_compiling():  # inductor generates no code for complex numbers
        a, b = pairs.unbind(-1)
        cos, sin = rotations.unbind(-1)
        rotated = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1)
    else:
        rotated = torch.view_as_real(
            torch.view_as_complex(pairs) * torch.view_as_complex(rotations)
        )
    return rotated.flatten(-2).to(x.dtype)
