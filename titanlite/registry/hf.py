"""How a model's parameters appear in a Hugging Face folder: names, and invertible steps between the two forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Box = tuple[slice, ...]
"""A part of a tensor: a start and a stop for each dimension."""


class WeightTransform:
    """An invertible step between a tensor here and its form in a Hugging Face folder."""

    def to_hf(self, weight: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def from_hf(self, weight: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def around(self, box: Box, shape: Sequence[int]) -> tuple[Box, Box, WeightTransform]:
        """A box over there, the box here that is made of it alone and has all of `box`, and the step that does so.

        Whoever wants one row of a tensor reads all of it where a step does not say better.
        """
        whole = tuple(slice(0, size) for size in shape)
        import torch

        there = self.to_hf(torch.empty(tuple(shape), device="meta")).shape
        return tuple(slice(0, size) for size in there), whole, self


@dataclass(frozen=True)
class Rotary(WeightTransform):
    """Rows of a projection whose heads rotate adjacent pairs here, and halves over there."""

    heads: int

    def to_hf(self, weight: torch.Tensor) -> torch.Tensor:
        rows = weight.unflatten(0, (self.heads, -1, 2))
        return rows.transpose(1, 2).reshape(weight.shape)

    def from_hf(self, weight: torch.Tensor) -> torch.Tensor:
        rows = weight.unflatten(0, (self.heads, 2, -1))
        return rows.transpose(1, 2).reshape(weight.shape)

    def around(self, box: Box, shape: Sequence[int]) -> tuple[Box, Box, WeightTransform]:
        rows = shape[0] // self.heads
        first, last = box[0].start // rows, -(-box[0].stop // rows)
        heads = (slice(first * rows, last * rows), *box[1:])
        return heads, heads, Rotary(last - first)


@dataclass(frozen=True)
class Transposed(WeightTransform):
    """A matrix whose rows and columns are swapped over there."""

    def to_hf(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.t()

    def from_hf(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.t()

    def around(self, box: Box, shape: Sequence[int]) -> tuple[Box, Box, WeightTransform]:
        return box[::-1], box, self


@dataclass(frozen=True)
class FusedSlice:
    """One of several equal parts that are joined along a dimension over there, after the steps of `via`."""

    index: int
    of: int
    dim: int = 0


@dataclass(frozen=True)
class HuggingFace:
    """A model's folder over there, but for the tensors, which the table names."""

    config: Callable[[Any], dict[str, Any]]
    """What config.json says of a flavor."""
    free: tuple[str, ...] = ()
    """Of that, what the weights do not depend on: a folder that is read may say otherwise."""
    ignored: tuple[str, ...] = ()
    """Patterns of tensors over there that hold nothing learned."""
