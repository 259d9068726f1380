"""A reader for torch's DCP with which each rank reads on its own what it needs."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.futures import Future

from titanlite.checkpoint import transfer
from titanlite.checkpoint.commit import Alone, alone, run_on_all_ranks
from titanlite.checkpoint.manifest import CorruptCheckpoint, Manifest
from titanlite.checkpoint.places import rank_file
from titanlite.checkpoint.plan import chunk_of, flat, nested
from titanlite.parallel.dtensor import box_of, let_go, local_part
from titanlite.runtime.bucket import Place


class Reader(Alone, dcp.StorageReader):
    """Reads a step; given `tensors`, it lists only the chunks for this rank's parts of them."""

    def __init__(
        self,
        folder: Place,
        manifest: Manifest,
        tensors: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self._folder = folder
        self._manifest = manifest
        self._tensors = tensors or {}
        self._files: dict[Any, str] = {}
        names = manifest.tensors if tensors is None else tensors.keys() & manifest.tensors
        self._metadata = dcp.Metadata({name: self._stored(name) for name in names})

    def _stored(self, name: str) -> TensorStorageMetadata:
        entry = self._manifest.tensors[name]
        box = tuple(slice(0, size) for size in entry.shape)
        if name in self._tensors and self._tensors[name].shape == entry.shape:
            box = box_of(self._tensors[name])
        chunks = []
        if all(entry.shape):  # not empty
            for rank, region in entry.layout.parts(entry.shape, box):
                chunks.append(chunk_of(region))
                self._files[name, chunks[-1].offsets] = rank_file(rank)
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


class _Planner(dcp.DefaultLoadPlanner):
    """Plans a load into tensors of this rank whose names and shapes were checked.

    torch's own asks each tensor for its kind, which takes half of the time of a small load.
    """

    def set_up_planner(
        self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict = flat(state_dict)
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata
        items: list[ReadItem] = []
        for name, tensor in self.state_dict.items():
            stored: Any = self.metadata.state_dict_metadata[name]
            items += create_read_items_for_chunk_list(name, stored, [chunk_of(box_of(tensor))])
        return LoadPlan(items)

    def lookup_tensor(self, index: Any) -> torch.Tensor:
        return local_part(self.state_dict[index.fqn])


def read(
    folder: Place,
    manifest: Manifest,
    tensors: Mapping[str, torch.Tensor],
    group: dist.ProcessGroup | None,
) -> None:
    """Fill tensors, or this rank's parts of them, with dcp.load."""

    def load() -> None:
        own = {name: tensor for name, tensor in tensors.items() if local_part(tensor).numel()}
        reader = Reader(folder, manifest, own)
        alone(dcp.load, nested(own), storage_reader=reader, planner=_Planner())

    run_on_all_ranks(group, f"reading {folder}", load)
    transfer.forget(folder, manifest)


def dtype_of(name: str) -> torch.dtype:
    """Return the torch type that a manifest names."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CorruptCheckpoint(f'"{name}" is not a tensor type')
    return dtype
