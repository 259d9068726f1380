"""Start from a checkpoint of TorchTitan, on any mesh: each rank reads the regions that its shards
hold, through torch's own reader.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.distributed.checkpoint import load
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from titanlite.checkpoint.commit import cause
from titanlite.checkpoint.read import Regions, Wanted
from titanlite.checkpoint.stored_tensors import sizes_of
from titanlite.checkpoint.torchtitan.metadata import DCPReader
from titanlite.checkpoint.torchtitan.names import Names
from titanlite.errors import UserError, first_line, some_of
from titanlite.parallel.dtensor import box_of, let_go, local_part
from titanlite.registry import Box, ModelSpec
from titanlite.runtime.store import LocalPath

_TYPES = ("float64", "float32", "bfloat16", "float16", "int64", "int32", "bool")


@dataclass(frozen=True)
class Stored:
    """The description of a stored tensor."""

    key: str
    shape: tuple[int, ...]
    dtype: str


class DCPFolder:
    """A folder written by torch's DCP."""

    def __init__(self, path: LocalPath) -> None:
        self._reader = DCPReader(path)
        entries = self._reader.metadata.state_dict_metadata
        self.tensors = list[Stored]()
        for key, entry in entries.items():
            if isinstance(entry, TensorStorageMetadata):
                dtype = str(entry.properties.dtype).removeprefix("torch.")
                self.tensors.append(Stored(key, tuple(entry.size), dtype))
        self.objects = entries.keys() - {stored.key for stored in self.tensors}

    def read(self, wanted: Wanted, objects: list[str]) -> dict[str, Any]:
        """Fill tensors; return the objects with these keys."""
        planner = Regions(wanted, objects)
        try:
            load({}, storage_reader=self._reader, planner=planner, no_dist=True)
        except CheckpointException as failed:
            error = cause(failed)
            why = first_line(error)
            kind = re.search(r"(?:GLOBAL|class) ([\w.]+)", str(error))
            if kind:
                why = f"has tensors of {kind[1]}, such as quantized ones; only plain ones are read"
            raise UserError(f"{self._reader.folder}: {why}") from None
        return planner.objects


class TorchSaveFile:
    """A file of torch.save, made from such a folder by dcp_to_torch_save."""

    def __init__(self, path: LocalPath) -> None:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            self._values = dict(_flat("", state))
        except Exception as error:  # a damaged file may raise anything
            raise UserError(
                f"{path}: not a file of dcp_to_torch_save that can be read with weights_only: "
                f"{first_line(error)}"
            ) from None
        self.tensors = list[Stored]()
        for key, value in self._values.items():
            if isinstance(value, torch.Tensor):
                dtype = str(value.dtype).removeprefix("torch.")
                self.tensors.append(Stored(key, tuple(value.shape), dtype))
        self.objects = self._values.keys() - {stored.key for stored in self.tensors}

    def read(self, wanted: Wanted, objects: list[str]) -> dict[str, Any]:
        for key, (box, target) in wanted.items():
            target.copy_(self._values[key][box or ...])
        return {key: self._values[key] for key in objects}


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        yield prefix, value
        return
    for key, inner in value.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        yield from _flat(name, inner)


class TorchTitanCheckpoint:
    """An opened checkpoint of TorchTitan: tensors by our names, and the run's progress."""

    base = None  # it has all weights

    def __init__(self, path: LocalPath, spec: ModelSpec, flavor: Any) -> None:
        self.path = path
        self._source = TorchSaveFile(path) if path.is_file() else DCPFolder(path)
        self._names = Names(spec, flavor)
        self.tensors: dict[str, Stored] = {}
        """The weights, and the optimizer's tensors for each weight."""
        self._scalars: dict[str, Stored] = {}
        for stored in self._source.tensors:
            name = self._names.ours(stored.key)
            if name.startswith("optimizer.") and not stored.shape:
                self._scalars[name] = stored
            elif name:
                self.tensors[name] = stored
        unread = []
        for stored in self.tensors.values():
            if stored.dtype not in _TYPES:
                unread.append(f"{stored.key}: {stored.dtype}")
        if unread:
            raise UserError(f"{path} has tensors of types that are not read:{some_of(unread)}")
        self._require_zeros()

    def _require_zeros(self) -> None:
        """Raise unless the tensors that this model lacks are zero."""
        there = {stored.key: stored.shape for stored in self._source.tensors}
        wanted = dict[str, tuple[Box, torch.Tensor]]()
        for key in self._names.form.zeros:
            if key in there:
                whole = tuple(slice(0, size) for size in there[key])
                wanted[key] = whole, torch.zeros(there[key])
        self._source.read(wanted, [])
        used = [key for key, (_, value) in wanted.items() if value.any()]
        if used:
            raise UserError(
                f"{self.path} has values that the model has no tensors for; routers have biases "
                f'only with model.overrides.balance = "bias":{some_of(used)}'
            )

    @cached_property
    def progress(self) -> tuple[int, int]:
        """The step, and the number of tokens seen by all ranks."""
        keys = ["train_state.step", "train_state.ntokens_seen", "dataloader.world_size"]
        found = self._source.read({}, [key for key in keys if key in self._source.objects])
        if keys[0] not in found:
            raise UserError(
                f"{self.path} contains weights only and cannot be resumed: there is no {keys[0]}; "
                "start from the weights with checkpoint.initial_load_model_only = true"
            )
        step, tokens, ranks = (found.get(key, 1) for key in keys)
        return step, tokens * ranks  # TorchTitan counts the tokens of one data-parallel rank

    @cached_property
    def numbers(self) -> dict[str, float]:
        """The optimizer's numbers, by our names."""
        values = {name: torch.zeros(()) for name in self._scalars}
        self._source.read({self._scalars[name].key: ((), values[name]) for name in values}, [])
        return {name: value.item() for name, value in values.items()}

    @torch.no_grad()
    def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy this rank's part of each of these tensors."""
        wanted: dict[str, tuple[Box, torch.Tensor]] = {}
        turned = []
        for name, tensor in tensors.items():
            stored = self.tensors[name]
            local = local_part(tensor).detach()
            box = box_of(tensor)
            buffer = local
            if not local.numel():
                continue
            for transform in self._names.via(name):
                box, made, inverse = transform.source_region(box_of(tensor), stored.shape)
                buffer = torch.empty(sizes_of(box), dtype=local.dtype)
                turned.append((tensor, made, inverse, buffer))
            wanted[stored.key] = box, buffer
        self._source.read(wanted, [])
        for tensor, made, inverse, buffer in turned:
            pairs = zip(box_of(tensor), made, strict=True)
            part = tuple(slice(a.start - b.start, a.stop - b.start) for a, b in pairs)
            local_part(tensor).copy_(inverse.from_hf(buffer)[part])
        for tensor in tensors.values():
            let_go(tensor)
