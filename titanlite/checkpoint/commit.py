"""How a checkpoint is written: staged, verified, and published by one rename. No other module knows how.

    .step-N.TOKEN.staging/  every rank's tensors, on the disk, with the size and checksum of each file;
                       rank 0 adds the JSON documents, and the manifest last
    step-N/            the same folder under its final name, once all that was planned is stored on every rank
    latest             the newest step's name, for people and scripts; updated after the rename

Nothing is ever written into a committed folder. Each rank's work runs under `run_on_all_ranks`: either all ranks
continue, or all raise the same error.
"""

import errno
import json
import os
import re
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from titanlite.checkpoint.manifest import MANIFEST, Chunk, File, Manifest, Tensor, step_folder
from titanlite.errors import RunFailed, UserError, first_line
from titanlite.parallel.dtensor import describe_placement
from titanlite.runtime import store
from titanlite.runtime.distributed import gather_objects, rank_in

T = TypeVar("T")
_DCP_INDEX = ".metadata"
"""For other tools that read DCP; titanlite never opens it, since it is a pickle."""
SEEN_BY_ALL = ".seen-by-all-"
"""Prefix of the file that shows whether all ranks share the folder."""
FAILPOINTS = (
    *("staging begun", "file begun", "half a file", "file written", "tensors stored"),
    *("before the manifest", "half a manifest", "after the manifest", "before the rename", "after the rename"),
    *("before latest", "after latest", "before a deletion", "half a deletion", "after a deletion"),
)
"""Where a kill would hurt most, in order; "… file …" and "tensors stored" on every rank, the others on rank 0."""


def failpoint(name: str) -> None:
    """Do nothing; tests put a kill or an error in its place."""
    assert name in FAILPOINTS


def run_on_all_ranks(
    group: dist.ProcessGroup | None, what: str, action: Callable[[], T], error_type: type[UserError] = RunFailed
) -> T:
    """Run an action on every rank; if it fails on any, raise on all of them what failed where.

    Without a group there is only this process.
    """
    results: list[T] = []
    failure = ""
    try:
        results.append(action())
    except CheckpointException as error:  # a BaseException that DCP raises on every rank, with the errors by rank
        cause, _ = error.failures.get(rank_in(group), (None, None))
        failure = _describe(cause) if cause else ""
    except Exception as error:
        failure = _describe(error)
    failures = gather_objects(failure, group)
    if failed := [rank for rank, text in enumerate(failures) if text]:
        where = f" on rank {', '.join(map(str, failed))}" if group else ""
        raise error_type(f"{what} failed{where}: {failures[failed[0]]}")
    return results[0]


def _describe(error: BaseException) -> str:
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {first_line(error)}"


@contextmanager
def staging_folder(target: Path, group: dist.ProcessGroup | None, what: str) -> Iterator[Path]:
    """Make an empty folder for all ranks to write into; delete it if anything fails, since the disk may be full."""
    token = gather_objects(uuid.uuid4().hex[:8], group)[0]  # or two runs in one folder would mix their bytes
    folder = target.with_name(f".{target.name}.{token}.staging")

    def begin() -> None:
        store.make_folder(folder)
        failpoint("staging begun")

    try:
        run_on_all_ranks(group, what, lambda: begin() if rank_in(group) == 0 else None)
        yield folder
    except BaseException:
        if rank_in(group) == 0:
            with suppress(OSError):
                store.delete(folder)
        raise


def commit(
    root: Path,
    step: int,
    tensors: Mapping[str, torch.Tensor],
    lookup: Callable[[str], torch.Tensor],
    rank_payload: Any,
    make_documents: Callable[[list[Any]], dict[str, bytes]],
    weights_only: bool,
    group: dist.ProcessGroup | None,
) -> None:
    """Write and publish a checkpoint; all ranks return when it is committed, or raise RunFailed.

    `tensors` are this rank's and say how each is sharded, `lookup` returns the values of its part, on any device.
    From every rank's `rank_payload`, rank 0 makes the documents (contents by file name) that lie beside the tensors.
    """
    rank, target, saving = rank_in(group), step_folder(root, step), f"the save of step {step}"

    def refuse_existing() -> None:
        if store.exists(target):
            raise UserError(f"{target} exists, and nothing is ever written into a checkpoint")

    def publish(payloads: list[tuple[dict[str, File], dict[str, str], Any]]) -> None:
        files = {name: file for rank_files, _, _ in payloads for name, file in rank_files.items()}
        placements = {name: text for _, rank_placements, _ in payloads for name, text in rank_placements.items()}
        for name, content in make_documents([payload for _, _, payload in payloads]).items():
            store.write(staging / name, content)
            files[name] = File(len(content), zlib.crc32(content))
        entries = _tensor_entries(writer.stored, placements, files)
        _publish(root, staging, Manifest(step, weights_only, files, entries))

    run_on_all_ranks(group, saving, lambda: refuse_existing() if rank == 0 else None)
    with staging_folder(target, group, saving) as staging:
        writer = _Writer(staging)
        written = run_on_all_ranks(group, saving, lambda: _write_tensors(writer, tensors, lookup, group))
        payloads = gather_objects((*written, rank_payload), group)
        run_on_all_ranks(group, f"the commit of step {step}", lambda: publish(payloads) if rank == 0 else None)


def _write_tensors(
    writer: "_Writer",
    tensors: Mapping[str, torch.Tensor],
    lookup: Callable[[str], torch.Tensor],
    group: dist.ProcessGroup | None,
) -> tuple[dict[str, File], dict[str, str]]:
    """Write this rank's part of the tensors; return the files, and the placement of each tensor that it began."""
    planner, rank = _Planner(lookup), rank_in(group)
    dcp.save(dict(tensors), storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)
    files = {}
    for name, path in store.list_folder(writer.staging).items():
        if name.startswith(f"__{rank}_") or (rank == 0 and name == _DCP_INDEX):
            # Summed after the write: the checksum is of what the file holds, and the disk works meanwhile.
            files[name] = File(*store.sync_and_sum(path))
    failpoint("tensors stored")
    begun = [item.index.fqn for item in planner.plan.items if not any(item.index.offset or ())]
    return files, {name: describe_placement(tensors[name]) for name in begun}  # each tensor's by one rank


class _Planner(DefaultSavePlanner):
    """Plans by how the live tensors are sharded, and takes the values from `lookup`."""

    def __init__(self, lookup: Callable[[str], torch.Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._lookup, self._looked_up = lookup, 0

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        # The writer asks for a tensor when it has written the one before.
        if self._looked_up == 0:
            failpoint("file begun")
        if self._looked_up == len(self.plan.items) // 2:
            failpoint("half a file")
        self._looked_up += 1
        return self._lookup(index.fqn)


class _Writer(dcp.FileSystemWriter):
    """Writes one file per rank; syncing it is left to the store."""

    def __init__(self, staging: Path) -> None:
        # With more threads, torch 2.11 to 2.13 lose a writer's error; copying ahead waits for the training's stream.
        super().__init__(staging, sync_files=False, thread_count=1, per_thread_copy_ahead=0)
        self.staging = staging

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            results = super().write_data(plan, planner)
        except RuntimeError as error:  # of torch's writer, which names no cause
            if store.free_bytes(self.staging) < 1 << 20:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
            raise
        failpoint("file written")
        return results

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta()  # torch's would hold the path of the staging folder

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0, keep where all ranks' parts are. (torch 2.11 puts it into a copy that is not returned.)"""
        super().finish(metadata, results)
        storage = {result.index: result.storage_data for rank_results in results for result in rank_results}
        self.stored = replace(metadata, storage_data=storage)


def _tensor_entries(stored: Metadata, placements: Mapping[str, str], files: Mapping[str, File]) -> dict[str, Tensor]:
    """Return every tensor's entry; raise unless each planned chunk is inside a file that was written."""
    entries = {}
    assert stored.state_dict_metadata.keys() == placements.keys()
    for name, planned in stored.state_dict_metadata.items():
        assert isinstance(planned, TensorStorageMetadata)
        chunks = []
        for chunk in planned.chunks:
            info = stored.storage_data.get(MetadataIndex(name, chunk.offsets))
            if info is None or info.offset + info.length > files[info.relative_path].size:
                raise OSError(f"{name} at {list(chunk.offsets)} was planned, but is not stored")
            chunks.append(
                Chunk(tuple(chunk.offsets), tuple(chunk.sizes), info.relative_path, info.offset, info.length)
            )
        dtype = str(planned.properties.dtype).removeprefix("torch.")
        entries[name] = Tensor(tuple(planned.size), dtype, placements[name], tuple(chunks))
    return entries


def _publish(root: Path, staging: Path, manifest: Manifest) -> None:
    """Write the manifest, rename the folder and update `latest`: rank 0, when every rank has stored its part."""
    failpoint("before the manifest")
    store.write(staging / MANIFEST, manifest.render(), lambda: failpoint("half a manifest"))
    failpoint("after the manifest")
    for name, file in manifest.files.items():
        if (size := store.size(staging / name)) != file.size:
            raise OSError(f"{name} has {size} bytes, {file.size} were written")
    store.sync(staging)
    failpoint("before the rename")
    store.rename(staging, step_folder(root, manifest.step))
    failpoint("after the rename")
    point_latest(root, manifest.step)


def point_latest(root: Path, step: int) -> None:
    """Let `latest` name a step."""
    failpoint("before latest")
    store.write(root / ".latest.new", f"step-{step}\n".encode())
    store.rename(root / ".latest.new", root / "latest")
    failpoint("after latest")


def delete(folder: Path) -> None:
    """Delete a checkpoint: first its name, so that half of one is never taken for a complete one.

    Of a checkpoint that is a link to another place, such as an archive, only the link is deleted.
    """
    failpoint("before a deletion")
    deleted = folder.with_name(f".{folder.name}.deleted")
    store.rename(folder, deleted)
    if not deleted.is_symlink():
        store.delete(deleted / MANIFEST)
    failpoint("half a deletion")
    store.delete(deleted)
    failpoint("after a deletion")


def clear_leftovers(root: Path, what: str = r"(hf-)?step-\d+") -> list[str]:
    """Delete what a killed save, export, deletion or start left; return the names."""
    staging = rf"\.{what}(\.[0-9a-f]{{8}})?\.staging"
    pattern = re.compile(rf"{staging}|\.step-\d+\.deleted|{re.escape(SEEN_BY_ALL)}[0-9a-f]{{32}}")
    leftovers = {name: path for name, path in sorted(store.list_folder(root).items()) if pattern.fullmatch(name)}
    for path in leftovers.values():
        store.delete(path)
    return list(leftovers)


def to_json(value: Any) -> bytes:
    """Return a JSON document; raise if JSON cannot hold the value."""
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()
