"""A planner for torch's DCP with which each rank plans on its own what it writes.

DCP's own planner gathers a plan, and writes a .metadata, whose size grows with ranks x tensors.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from titanlite.checkpoint.commit import run_on_all_ranks
from titanlite.checkpoint.layouts import agree, describe_all
from titanlite.checkpoint.stored_tensors import (
    StoredTensor,
    safetensors_header,
    sizes_of,
    written_by,
)
from titanlite.parallel.dtensor import box_of, local_part
from titanlite.registry import Box
from titanlite.runtime.distributed import rank_in


class Planner(dcp.SavePlanner):
    """Plans the first save of a run on this rank; later saves reuse the plan."""

    def __init__(
        self, group: dist.ProcessGroup | None = None, replicas: tuple[int, int] = (1, 1)
    ) -> None:
        """`replicas` share out what all of them have: their number, and the ranks from one to the
        next.
        """
        self.tensors: dict[str, torch.Tensor] = {}
        """This rank's tensors by dotted name; a later save may bring copies of the first ones."""
        self.stored: dict[str, StoredTensor] = {}
        """The tensors of all ranks."""
        self._group = group
        self._replicas = replicas
        self._plan = dcp.SavePlan([])

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        self.tensors = flat(state_dict)

    @torch.no_grad()  # which makes a DTensor's own part available
    def create_local_plan(self) -> dcp.SavePlan:
        if not self.stored:
            what = "planning a save"
            describe = partial(describe_all, self.tensors, rank_in(self._group), self._replicas)
            own = run_on_all_ranks(self._group, what, describe)
            stored = agree(own, self._group)
            self._plan = run_on_all_ranks(self._group, what, partial(self._planned, stored))
            self.stored = stored
        return self._plan

    def _planned(self, stored: dict[str, StoredTensor]) -> dcp.SavePlan:
        regions = written_by(rank_in(self._group), stored)
        alike: dict[StoredTensor, TensorWriteData] = {}  # as most of a model's tensors are
        items = []
        for name, region in regions.items():
            data = alike.get(stored[name])
            if data is None:
                found = box_of(self.tensors[name])
                if found != region:
                    raise RuntimeError(f"{name}: {region} was planned, but this rank has {found}")
                data = alike[stored[name]] = _write_data(stored[name], region)
            index = MetadataIndex(name, data.chunk.offsets)
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return dcp.SavePlan(items, storage_data=safetensors_header(stored, regions))

    def create_global_plan(self, all_plans: Any) -> Any:
        return all_plans, dcp.Metadata({})

    def finish_plan(self, new_plan: Any) -> Any:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        name = write_item.index.fqn
        planned = write_item.tensor_data
        value = self.lookup(name)
        assert planned
        if (value.dtype, value.shape) != (planned.properties.dtype, planned.chunk.sizes):
            raise RuntimeError(
                f"{name}: {planned.properties.dtype} of shape {[*planned.chunk.sizes]} was "
                f"planned, and there is {value.dtype} of shape {[*value.shape]}"
            )
        return value

    def lookup(self, name: str) -> torch.Tensor:
        """Return this rank's part of a tensor, on any device."""
        return local_part(self.tensors[name]).detach()


def chunk_of(region: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(
        torch.Size(each.start for each in region), torch.Size(sizes_of(region))
    )


def _write_data(tensor: StoredTensor, region: Box) -> TensorWriteData:
    properties = TensorProperties(dtype=getattr(torch, tensor.dtype))
    return TensorWriteData(chunk_of(region), properties, torch.Size(tensor.shape))


def flat(state_dict: Mapping[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    """Return the tensors of nested dicts by their keys, joined by dots."""
    found: dict[str, torch.Tensor] = {}
    for key, value in state_dict.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found |= flat(value, f"{name}.")
        else:
            found[name] = value
    return found


def nested(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return tensors with dotted names in dicts by the part before the first dot.

    DCP creates a logger for each top-level key, which takes a tenth of a millisecond.
    """
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        first, _, rest = name.partition(".")
        found.setdefault(first, {})[rest] = tensor
    return found
