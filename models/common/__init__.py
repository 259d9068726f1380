"""Layers that several models share, without any parallelism.

Models' tables import this file, so it imports no torch.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

Size = Annotated[int, Field(ge=1, le=2**31 - 1)]
Scale = Annotated[float, Field(ge=1e-6, le=1e12, allow_inf_nan=False)]
Epsilon = Annotated[float, Field(ge=1e-30, le=1, allow_inf_nan=False)]
"""Types and bounds of flavors' fields, which `--model.overrides` may change."""
Score = Literal["softmax", "sigmoid"]
BalanceMethod = Literal["sequence", "bias", "none"]
"""How a router keeps its experts evenly used (see `moe.Router`)."""


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's scaling of rotary wavelengths.

    Wavelengths above original_positions / low_freq_factor are stretched by `factor`, those below
    original_positions / high_freq_factor are kept, and those in between are blended.
    """

    factor: Scale = 8.0
    low_freq_factor: Scale = 1.0
    high_freq_factor: Scale = 4.0
    original_positions: Size = 8192
