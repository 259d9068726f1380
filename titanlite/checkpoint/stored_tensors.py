"""Where the parts of tensors are in a checkpoint. Imports no torch.

A manifest has a row for each tensor and for each file, but none for a tensor's part in a file: the
rank that has a region, and the order within a file, follow from shape, type, mesh and splits. So
each rank plans on its own what it writes, and a reader finds it by the same rule.
"""

import heapq
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

from titanlite.registry import Box

TYPES = {
    "complex64": ("C64", 8),
    "float64": ("F64", 8),
    "int64": ("I64", 8),
    "uint64": ("U64", 8),
    "float32": ("F32", 4),
    "int32": ("I32", 4),
    "uint32": ("U32", 4),
    "bfloat16": ("BF16", 2),
    "float16": ("F16", 2),
    "int16": ("I16", 2),
    "uint16": ("U16", 2),
    "bool": ("BOOL", 1),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
}
"""The safetensors name and the size in bytes of each type that checkpoints support."""


@dataclass(frozen=True)
class Split:
    """The ranks that write a tensor, and how they split it.

    The ranks form a mesh: at coordinates c is rank `first` + the sum of c x strides. Of several
    ranks with the same region only one writes it: the one whose coordinates differ from those of
    `first` only in dimensions that split the tensor.
    """

    names: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    first: int = 0
    splits: tuple[tuple[int, int], ...] = ()
    """Pairs of a tensor dimension and a mesh dimension, in the order of splitting."""

    @property
    def placement(self) -> str:
        """How each dimension of the mesh splits the tensor, for display."""
        split = {axis: f"dim {dim}" for dim, axis in self.splits}
        names = enumerate(self.names)
        described = [f"{split.get(axis, 'replicated')} over {name}" for axis, name in names]
        return ", ".join(described) or "replicated"

    def region(self, shape: Sequence[int], rank: int) -> Box | None:
        """Return the region that a rank writes; None if it writes none."""
        region = [slice(0, size) for size in shape]
        writer = self.first
        for dim, axis in self.splits:
            number = self.sizes[axis]
            stride = self.strides[axis]
            index = (rank - self.first) // stride % number
            region[dim] = _part(region[dim], number, index)
            writer += index * stride
        if writer != rank or not all(sizes_of(region)):
            return None  # another rank writes it, or the rank is not in the mesh or has nothing
        return tuple(region)

    def copies(self) -> tuple[int, ...]:
        """Return the possible values of `first`: the lowest rank of each copy of the tensor."""
        split = {axis for _, axis in self.splits}
        steps = []
        for axis, (size, stride) in enumerate(zip(self.sizes, self.strides, strict=True)):
            if axis not in split:
                steps.append(range(0, size * stride, stride))
        return tuple(self.first + sum(offsets) for offsets in product(*steps))

    def parts(self, shape: Sequence[int], wanted: Box) -> Iterator[tuple[int, Box]]:
        """Yield the ranks that wrote a part of a non-empty region, with the regions they wrote."""
        found = [(self.first, tuple(slice(0, size) for size in shape))]
        for dim, axis in self.splits:
            narrowed = []
            for rank, region in found:
                first = _part(region[dim], self.sizes[axis], 0)
                size = first.stop - first.start
                low = max(0, wanted[dim].start - first.start) // size
                for index in range(low, self.sizes[axis]):
                    part = _part(region[dim], self.sizes[axis], index)
                    if part.start >= min(part.stop, wanted[dim].stop):
                        break
                    own = (*region[:dim], part, *region[dim + 1 :])
                    narrowed.append((rank + index * self.strides[axis], own))
            found = narrowed
        yield from found


def sizes_of(region: Sequence[slice]) -> tuple[int, ...]:
    return tuple(each.stop - each.start for each in region)


def _part(whole: slice, number: int, index: int) -> slice:
    """Return one of `number` parts, divided as by torch.chunk: the last are smaller, or empty."""
    size = -(-(whole.stop - whole.start) // number)
    start = min(whole.stop, whole.start + index * size)
    return slice(start, min(whole.stop, start + size))


@dataclass(frozen=True)
class StoredTensor:
    """The description of a whole tensor, and how it is split."""

    shape: tuple[int, ...]
    dtype: str
    layout: Split

    @property
    def placement(self) -> str:
        return self.layout.placement

    def bytes_of(self, sizes: Sequence[int]) -> int:
        return prod(sizes) * TYPES[self.dtype][1]


def spread(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the same tensors, each assigned to the copy that has the least to write so far."""
    queues: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    chosen = {}
    for name, tensor in tensors.items():
        copies = tensor.layout.copies()
        queue = queues.setdefault(copies, [(0, first) for first in copies])
        nbytes, first = queue[0]
        heapq.heapreplace(queue, (nbytes + tensor.bytes_of(tensor.shape), first))
        if first != tensor.layout.first:
            tensor = replace(tensor, layout=replace(tensor.layout, first=first))
        chosen[name] = tensor
    return chosen


def tensor_file(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank-{rank}.safetensors"


def written_by(rank: int, tensors: Mapping[str, StoredTensor]) -> dict[str, Box]:
    """Return the regions that a rank writes, in the order of its file."""
    found = {}
    alike: dict[StoredTensor, Box | None] = {}
    # Larger types first, so that each value is aligned.
    for name in sorted(tensors, key=lambda name: (-tensors[name].bytes_of(()), name)):
        tensor = tensors[name]
        if tensor not in alike:
            alike[tensor] = tensor.layout.region(tensor.shape, rank)
        region = alike[tensor]
        if region is not None:
            found[name] = region
    return found


def safetensors_header(tensors: Mapping[str, StoredTensor], regions: Mapping[str, Box]) -> bytes:
    """Return the header of a safetensors file of these regions.

    Its metadata lets torch's HuggingFaceStorageReader join the ranks' files.
    """
    entries = dict[str, Any]()
    offsets = {}
    end = 0
    for name, region in regions.items():
        sizes = sizes_of(region)
        begin = end
        end += tensors[name].bytes_of(sizes)
        kind = TYPES[tensors[name].dtype][0]
        entries[name] = {"dtype": kind, "shape": sizes, "data_offsets": (begin, end)}
        offsets[name] = {"saved_offsets": [each.start for each in region]}
    marks = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
    text = json.dumps({"__metadata__": marks, **entries}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
