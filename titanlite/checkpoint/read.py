"""A reader for torch's DCP with which each rank reads on its own what it needs."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint.metadata import (
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.futures import Future

from titanlite.checkpoint import transfer
from titanlite.checkpoint.commit import Alone, alone, run_on_all_ranks
from titanlite.checkpoint.manifest import CorruptCheckpoint, Manifest
from titanlite.checkpoint.plan import chunk_of
from titanlite.checkpoint.stored_tensors import tensor_file
from titanlite.parallel.dtensor import box_of, let_go, local_part
from titanlite.registry import Box
from titanlite.runtime.bucket import Place

Wanted = Mapping[str, tuple[Box, torch.Tensor]]
"""The region to read and the tensor to fill with it, by key."""


class CheckpointReader(Alone, dcp.StorageReader):
    """Reads a step; given `tensors`, it lists only the chunks for this rank's parts of them."""

    def __init__(
        self,
        folder: Place,
        manifest: Manifest,
        tensors: Mapping[str, torch.Tensor] | None = None,
        boxes: Mapping[str, Box] | None = None,
    ) -> None:
        """`boxes` are the regions of the tensors, if they are known already."""
        self._folder = folder
        self._manifest = manifest
        self._tensors = tensors or {}
        self._boxes = boxes or {}
        self._files: dict[Any, str] = {}
        names = manifest.tensors if tensors is None else tensors.keys() & manifest.tensors
        self._metadata = dcp.Metadata({name: self._stored(name) for name in names})

    def _stored(self, name: str) -> TensorStorageMetadata:
        entry = self._manifest.tensors[name]
        box = tuple(slice(0, size) for size in entry.shape)
        if name in self._tensors and self._tensors[name].shape == entry.shape:
            box = self._boxes.get(name) or box_of(self._tensors[name])
        chunks = []
        if all(entry.shape):  # not empty
            for rank, region in entry.layout.parts(entry.shape, box):
                chunks.append(chunk_of(region))
                self._files[name, chunks[-1].offsets] = tensor_file(rank)
        properties = TensorProperties(dtype=dtype_of(entry.dtype))
        return TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        return self._metadata

    def read_data(self, plan: dcp.LoadPlan, planner: LoadPlanner) -> Future[None]:
        items = defaultdict[str, list[ReadItem]](list)
        for item in plan.items:
            items[self._files[item.storage_index.fqn, item.storage_index.offset]].append(item)
        absent = items.keys() - self._manifest.files
        if absent:
            file = min(absent)
            raise CorruptCheckpoint(
                f"{self._folder}: {items[file][0].storage_index.fqn} is in {file}, which is not "
                "part of the checkpoint"
            )
        with transfer.fetched(self._folder, self._manifest, items) as source:
            for file_name in items:
                with safe_open(source / file_name, framework="pt") as file:
                    for item in items[file_name]:
                        self._fill(planner, item, file.get_slice(item.storage_index.fqn))
        done = Future[None]()
        done.set_result(None)
        return done

    def _fill(self, planner: LoadPlanner, item: ReadItem, stored: Any) -> None:
        bounds = zip(item.storage_offsets, item.lengths, strict=True)
        region = tuple(slice(start, start + size) for start, size in bounds)
        target = planner.resolve_tensor(item).detach()
        target.copy_(stored[region or ...])
        planner.commit_tensor(item, target)
        let_go(self._tensors.get(item.dest_index.fqn, target))

    def set_up_storage_reader(self, *args: Any, **kwargs: Any) -> None: ...


class Regions(dcp.DefaultLoadPlanner):
    """Reads regions of tensors, and objects without code.

    torch's own planner asks each tensor for its kind, which takes half of the time of a small load.
    """

    def __init__(self, wanted: Wanted, objects: Sequence[str] = ()) -> None:
        super().__init__()
        self._wanted = wanted
        self._keys = objects
        self.objects: dict[str, Any] = {}

    def set_up_planner(
        self, state_dict: Any, metadata: dcp.Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self._entries = metadata.state_dict_metadata if metadata else {}

    def create_local_plan(self) -> LoadPlan:
        items = list[ReadItem]()
        nothing = torch.Size((0,))
        for key, (box, _) in self._wanted.items():
            entry = self._entries[key]
            assert isinstance(entry, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(key, entry, [chunk_of(box)])
        for key in self._keys:
            index = MetadataIndex(key)
            items.append(ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing))
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        target = self._wanted[read_item.dest_index.fqn][1]
        if read_item.lengths == target.shape:
            return target
        bounds = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return target[tuple(slice(start, start + size) for start, size in bounds)]

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        self.objects[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


@torch.no_grad()
def read(
    folder: Place,
    manifest: Manifest,
    tensors: Mapping[str, torch.Tensor],
    group: dist.ProcessGroup | None,
) -> None:
    """Fill tensors, or this rank's parts of them, with dcp.load."""

    def load() -> None:
        own, boxes, wanted = {}, {}, {}
        for name, tensor in tensors.items():
            part = local_part(tensor)
            if part.numel():
                own[name] = tensor
                boxes[name] = box_of(tensor)
                wanted[name] = boxes[name], part
        reader = CheckpointReader(folder, manifest, own, boxes)
        alone(dcp.load, {}, storage_reader=reader, planner=Regions(wanted))

    run_on_all_ranks(group, f"reading {folder}", load)
    transfer.forget(folder, manifest)


def dtype_of(name: str) -> torch.dtype:
    """Return the torch type that a manifest names."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CorruptCheckpoint(f'"{name}" is not a tensor type')
    return dtype
