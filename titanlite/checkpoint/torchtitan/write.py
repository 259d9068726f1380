"""Write a checkpoint in the format of torch's DCP, with one tensor in memory at a time."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, save
from torch.distributed.checkpoint.metadata import MetadataIndex

from titanlite.checkpoint.commit import alone
from titanlite.checkpoint.manifest import Manifest
from titanlite.checkpoint.read import dtype_of
from titanlite.checkpoint.torchtitan.names import Names

ReadTensor = Callable[[str], torch.Tensor]
"""Returns a tensor of a checkpoint, by our name."""


class _Late(DefaultSavePlanner):
    """Reads each tensor only when it is written; until then there is a description of it."""

    def __init__(self, read: ReadTensor) -> None:
        super().__init__()
        self._read = read

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = super().lookup_object(index)
        if isinstance(found, torch.Tensor) and found.is_meta:
            return self._read(index.fqn)
        return found


def write(
    folder: Path,
    manifest: Manifest,
    numbers: Mapping[str, float],
    names: Names,
    read: ReadTensor,
    extras: Mapping[str, Any],
) -> None:
    """Write all tensors of a checkpoint and the optimizer's numbers under TorchTitan's names, and
    `extras`.
    """
    state: dict[str, Any] = {key: torch.zeros(shape) for key, shape in names.form.zeros.items()}
    sources = {names.theirs(name): name for name in manifest.tensors}
    sources |= {second: sources[first] for second, first in names.ties.items() if first in sources}
    for key, name in sources.items():
        entry = manifest.tensors[name]
        state[key] = torch.empty(entry.shape, dtype=dtype_of(entry.dtype), device="meta")
    state |= {names.theirs(name): torch.tensor(float(value)) for name, value in numbers.items()}
    of_optimizer = {key: state.pop(key) for key in [*state] if key.startswith("optimizer.")}
    optimizer = {key.removeprefix("optimizer."): value for key, value in of_optimizer.items()}
    state |= {**extras, "optimizer": optimizer | extras.get("optimizer", {})}

    def read_theirs(key: str) -> torch.Tensor:
        tensor = read(sources[key])
        for transform in names.via(sources[key]):
            tensor = transform.to_hf(tensor)
        return tensor.contiguous()

    alone(save, state, storage_writer=FileSystemWriter(folder), planner=_Late(read_theirs))
