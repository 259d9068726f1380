"""How a model's parameters appear in a Hugging Face folder: names, and invertible transforms
between the forms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

Box = tuple[slice, ...]
"""A region of a tensor: a start and a stop for each dimension."""


class WeightTransform:
    """An invertible transform between one of our tensors and its form in a Hugging Face folder."""

    def to_hf(self, weight: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def from_hf(self, weight: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def source_region(self, box: Box, shape: Sequence[int]) -> tuple[Box, Box, WeightTransform]:
        """Return the region of the HF tensor to read, the region of ours it produces, and the
        transform between them.

        The second contains `box`, a region of our tensor of this shape. Unless a transform
        overrides this, all of the tensor is read.
        """
        import torch

        hf_shape = self.to_hf(torch.empty(tuple(shape), device="meta")).shape
        return (
            tuple(slice(0, size) for size in hf_shape),
            tuple(slice(0, size) for size in shape),
            self,
        )


@dataclass(frozen=True)
class Rotary(WeightTransform):
    """The RoPE permutation of a projection's rows: we rotate pairs, Hugging Face halves."""

    heads: int

    def to_hf(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.unflatten(0, (self.heads, -1, 2)).transpose(1, 2).reshape(weight.shape)

    def from_hf(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.unflatten(0, (self.heads, 2, -1)).transpose(1, 2).reshape(weight.shape)

    def source_region(self, box: Box, shape: Sequence[int]) -> tuple[Box, Box, WeightTransform]:
        rows = shape[0] // self.heads
        first = box[0].start // rows
        last = -(-box[0].stop // rows)
        heads = (slice(first * rows, last * rows), *box[1:])
        return heads, heads, Rotary(last - first)


@dataclass(frozen=True)
class Transposed(WeightTransform):
    """Swap the rows and columns of a matrix."""

    def to_hf(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.t()

    from_hf = to_hf

    def source_region(self, box: Box, shape: Sequence[int]) -> tuple[Box, Box, WeightTransform]:
        return box[::-1], box, self


@dataclass(frozen=True)
class FusedSlice:
    """One of several equal slices that a Hugging Face tensor joins along a dimension, after
    `via`.
    """

    index: int = 0
    of: int = 1
    dim: int = 0


@dataclass(frozen=True)
class TorchTitan:
    """How a model's weights in TorchTitan's checkpoints differ from ours."""

    names: Mapping[str, str] = field(default_factory=dict)
    """Endings of TorchTitan's names, by the endings of ours that they replace."""
    rotates_halves: bool = False
    """Whether rotary weights are in Hugging Face's order, as the table's transforms make them."""
    zeros: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of float32 tensors that TorchTitan has, all zero, and titanlite has not."""


class Conversion(Protocol):
    """Parameters that are stored as other tensors in a folder."""

    parameters: tuple[str, ...]
    names: tuple[str, ...]

    def to_hf(self, weights: Sequence[torch.Tensor], name: str) -> torch.Tensor:
        """Return one of the tensors."""
        ...

    def from_hf(self, parameter: str, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Return a parameter, made from tensors that `read` returns by name."""
        ...


@dataclass(frozen=True)
class HuggingFace:
    """A model's Hugging Face folder, except for tensor names, which are in the table."""

    config: Callable[[Any], dict[str, Any]]
    """Returns the content of config.json for a flavor."""
    unchecked_config_keys: tuple[str, ...] = ()
    """config.json keys that may differ on import, since no weight depends on them."""
    ignored_tensors: tuple[str, ...] = ()
    """Patterns of Hugging Face tensors to skip, such as buffers."""
    defaults: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda config: {}
    """Returns transformers' defaults for keys that a config.json lacks and that change values."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """The config.json key of each field of a flavor, both dotted where nested; read by
    model.flavor hf.
    """
    conversions: Callable[[Any], Mapping[str, Conversion]] | None = None
    """Returns the parameters of a flavor that a folder stores differently from the table.

    A model with conversions takes any config.json as a flavor.
    """
