"""Write a checkpoint: staged, verified, and published by one rename. No other module does so.

    .step-N.TOKEN.staging/  every rank's tensors, on the disk, with the size and checksum of each
                       file; rank 0 adds the JSON documents, and the manifest last
    step-N/            the same folder under its final name, once every planned tensor is stored on
                       every rank
    latest             the newest step's name, for people and scripts; updated after the rename

Nothing is ever written into a committed folder. Each rank's work runs under `run_on_all_ranks`:
either all ranks continue, or all raise the same error.
"""

import errno
import json
import os
import re
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from titanlite.checkpoint.manifest import MANIFEST, Chunk, File, Manifest, Tensor, step_folder
from titanlite.errors import RunFailed, UserError, first_line
from titanlite.runtime import store
from titanlite.runtime.distributed import gather_objects, rank_in

T = TypeVar("T")
_DCP_INDEX = ".metadata"
"""For other tools that read DCP; titanlite never opens it, since it is a pickle."""
SEEN_BY_ALL = ".seen-by-all-"
"""Prefix of the file that shows whether all ranks share the folder."""


@dataclass(frozen=True)
class Content:
    """What a checkpoint holds, on this rank."""

    step: int
    tensors: Mapping[str, torch.Tensor]
    """This rank's; they show how each is sharded."""
    lookup: Callable[[str], torch.Tensor]
    """Return the values of this rank's part of a tensor, on any device."""
    payload: Any
    """What this rank adds to the documents."""
    make_documents: Callable[[list[Any]], dict[str, bytes]]
    """On rank 0, return the files that lie next to the tensors, from the payloads of all ranks."""
    weights_only: bool


def run_on_all_ranks(
    group: dist.ProcessGroup | None,
    what: str,
    action: Callable[[], T],
    error_type: type[UserError] = RunFailed,
) -> T:
    """Run an action on every rank; if it fails on any, raise the same error on all of them.

    The error names the ranks and the first cause. Without a group there is only this process.
    """
    results: list[T] = []
    failure = ""
    try:
        results.append(action())
    except CheckpointException as error:
        # A BaseException that DCP raises on every rank, with the errors by rank.
        cause, _ = error.failures.get(rank_in(group), (None, None))
        if cause:
            failure = describe(cause)
    except Exception as error:
        failure = describe(error)
    failures = gather_objects(failure, group)
    failed = [rank for rank, text in enumerate(failures) if text]
    if not failed:
        return results[0]
    where = ""
    if group:
        where = f" on rank {', '.join(map(str, failed))}"
    raise error_type(f"{what} failed{where}: {failures[failed[0]]}")


def run_on_rank_0(group: dist.ProcessGroup | None, what: str, action: Callable[[], None]) -> None:
    """Run an action on rank 0; if it fails, raise the same error on all ranks."""

    def action_on_rank_0() -> None:
        if rank_in(group) == 0:
            action()

    run_on_all_ranks(group, what, action_on_rank_0)


def describe(error: BaseException) -> str:
    """Return an error as a line for a user."""
    if isinstance(error, UserError):
        return str(error)
    return f"{type(error).__name__}: {first_line(error)}"


@contextmanager
def staging_folder(target: Path, group: dist.ProcessGroup | None, what: str) -> Iterator[Path]:
    """Make an empty folder for all ranks to write into.

    It is deleted if anything fails, since the disk may be full.
    """
    # Without a token, two runs in one folder would mix their bytes.
    token = gather_objects(uuid.uuid4().hex[:8], group)[0]
    folder = target.with_name(f".{target.name}.{token}.staging")

    try:
        run_on_rank_0(group, what, partial(store.make_folder, folder))
        yield folder
    except BaseException:
        if rank_in(group) == 0:
            with suppress(OSError):
                store.delete(folder)
        raise


def commit(root: Path, content: Content, group: dist.ProcessGroup | None) -> None:
    """Write and publish a checkpoint; all ranks return when it is committed, or raise RunFailed."""
    step = content.step
    target = step_folder(root, step)
    saving = f"the save of step {step}"

    def refuse_existing() -> None:
        if store.exists(target):
            raise UserError(f"{target} exists, and nothing is ever written into a checkpoint")

    def publish() -> None:
        files: dict[str, File] = {}
        placements: dict[str, str] = {}
        payloads = []
        for rank_files, rank_placements, payload in parts:
            files |= rank_files
            placements |= rank_placements
            payloads.append(payload)
        for name, document in content.make_documents(payloads).items():
            store.write(staging / name, document)
            files[name] = File(len(document), zlib.crc32(document))
        entries = _tensor_entries(writer.stored, placements, files)
        _publish(root, staging, Manifest(step, content.weights_only, files, entries))

    run_on_rank_0(group, saving, refuse_existing)
    with staging_folder(target, group, saving) as staging:
        writer = _Writer(staging)
        own_files, own_placements = run_on_all_ranks(
            group, saving, lambda: _write_tensors(writer, content, group)
        )
        part = (own_files, own_placements, content.payload)
        parts = gather_objects(part, group, only_rank_0=True)
        run_on_rank_0(group, f"the commit of step {step}", publish)


def _write_tensors(
    writer: "_Writer", content: Content, group: dist.ProcessGroup | None
) -> tuple[dict[str, File], dict[str, str]]:
    """Write this rank's part of the tensors.

    Return the files, and the placements of the tensors with a first element that this rank
    wrote: so each has one from one rank.
    """
    planner = _Planner(content.lookup, group is not None)
    rank = rank_in(group)
    dcp.save(
        dict(content.tensors),
        storage_writer=writer,
        planner=planner,
        process_group=group,
        no_dist=group is None,
    )
    files = {}
    names = [f"__{rank}_0.distcp"]
    if rank == 0:
        names.append(_DCP_INDEX)
    for name in names:
        path = writer.staging / name
        if store.exists(path):  # a list would have the files of all ranks
            # Summed after the write: the checksum is of the file's content, and the disk works
            # meanwhile.
            files[name] = File(*store.sync_and_sum(path))
    placements = {}
    for item in planner.plan.items:
        index = item.index
        if not any(index.offset or ()):
            placements[index.fqn] = describe_placement(content.tensors[index.fqn])
    return files, placements


def describe_placement(tensor: torch.Tensor) -> str:
    """Describe how each dimension of the mesh splits the tensor, in the order of the mesh."""
    if not isinstance(tensor, DTensor):
        return "replicated"
    names = tensor.device_mesh.mesh_dim_names or ()
    splits = []
    for name, placement in zip(names, tensor.placements, strict=True):
        dim = getattr(placement, "dim", None)  # every kind of shard has one
        if dim is None:
            splits.append(f"replicated over {name}")
        else:
            splits.append(f"dim {dim} over {name}")
    return ", ".join(splits)


class _Planner(DefaultSavePlanner):
    """Plans by the shards of the live tensors, and takes the values from `lookup`.

    With `caching`, plans that did not change since the last save are neither sent nor merged.
    """

    def __init__(self, lookup: Callable[[str], torch.Tensor], caching: bool) -> None:
        super().__init__(
            flatten_state_dict=False, flatten_sharded_tensors=False, enable_plan_caching=caching
        )
        self._lookup = lookup

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self._lookup(index.fqn)


class _Writer(dcp.FileSystemWriter):
    """Writes one file per rank; syncing it is left to the store."""

    def __init__(self, staging: Path) -> None:
        # With more threads, torch 2.11 to 2.13 lose a writer's error; copying ahead waits for the
        # training's stream.
        super().__init__(staging, sync_files=False, thread_count=1, per_thread_copy_ahead=0)
        self.staging = staging

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:  # of torch's writer, which names no cause
            if store.free_bytes(self.staging) < 1 << 20:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
            raise

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta()  # torch's would hold the path of the staging folder

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0, keep the places of all ranks' parts.

        (torch 2.11 puts them into a copy that is not returned.)
        """
        super().finish(metadata, results)
        storage = {}
        for rank_results in results:
            for result in rank_results:
                storage[result.index] = result.storage_data
        self.stored = replace(metadata, storage_data=storage)


def _tensor_entries(
    stored: Metadata, placements: Mapping[str, str], files: Mapping[str, File]
) -> dict[str, Tensor]:
    """Return every tensor's entry; raise unless each planned chunk lies in a written file."""
    entries = {}
    assert stored.state_dict_metadata.keys() == placements.keys()
    for name, planned in stored.state_dict_metadata.items():
        assert isinstance(planned, TensorStorageMetadata)
        chunks = []
        for chunk in planned.chunks:
            info = stored.storage_data.get(MetadataIndex(name, chunk.offsets))
            if info is None or info.offset + info.length > files[info.relative_path].size:
                raise OSError(f"{name} at {list(chunk.offsets)} was planned, but is not stored")
            offsets = tuple(chunk.offsets)
            sizes = tuple(chunk.sizes)
            chunks.append(Chunk(offsets, sizes, info.relative_path, info.offset, info.length))
        dtype = str(planned.properties.dtype).removeprefix("torch.")
        entries[name] = Tensor(tuple(planned.size), dtype, placements[name], tuple(chunks))
    return entries


def _publish(root: Path, staging: Path, manifest: Manifest) -> None:
    """Write the manifest, rename the folder and update `latest`.

    Rank 0 does so, when every rank has stored its part.
    """
    store.write(staging / MANIFEST, manifest.render())
    for name, file in manifest.files.items():
        size = store.size(staging / name)
        if size != file.size:
            raise OSError(f"{name} has {size} bytes, {file.size} were written")
    store.publish(staging, step_folder(root, manifest.step))
    point_latest(root, manifest.step)


def point_latest(root: Path, step: int) -> None:
    """Write a step's name into `latest`."""
    with store.whole_file(root / "latest") as file:
        file.write(f"step-{step}\n".encode())


def delete(folder: Path) -> None:
    """Delete a checkpoint: first its name, so that half of one is never taken for a complete one.

    If it is a link to another place, such as an archive, only the link is deleted.
    """
    deleted = folder.with_name(f".{folder.name}.deleted")
    store.rename(folder, deleted)
    if not deleted.is_symlink():
        store.delete(deleted / MANIFEST)
    store.delete(deleted)


def clear_leftovers(root: Path, what: str = r"(hf-)?step-\d+") -> list[str]:
    """Delete the leftovers of a killed save, export, deletion or start; return the names."""
    staging = rf"\.{what}(\.[0-9a-f]{{8}})?\.staging"
    seen = rf"{re.escape(SEEN_BY_ALL)}[0-9a-f]{{32}}"
    pattern = re.compile(rf"{staging}|\.step-\d+\.deleted|{seen}")
    leftovers = []
    for name, path in sorted(store.list_folder(root).items()):
        if pattern.fullmatch(name):
            store.delete(path)
            leftovers.append(name)
    return leftovers


def to_json(value: Any) -> bytes:
    """Return a JSON document; raise if JSON cannot hold the value."""
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()
