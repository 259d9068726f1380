"""How a checkpoint comes into being: staged, verified, published by one rename. Nobody else knows how.

    .step-N.staging/   every rank's tensors, fsynced, each file's size and checksum taken while it is written
                       rank 0 adds the JSON, and the manifest last
    step-N/            the same folder under its final name, once every rank has told that all it planned is stored
    latest             the newest step's name, for people and scripts; moved after the rename

Nothing is ever written into a committed folder. What a rank does runs under
`run_on_all_ranks`: either all ranks continue, or all raise the same error.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from titanlite.checkpoint.manifest import MANIFEST, Chunk, File, Manifest, Tensor, leftovers, step_folder
from titanlite.errors import UserError, first_line

T = TypeVar("T")
_WORTH_A_THREAD = 1 << 18
"""Bytes; the sum of fewer takes no longer than asking for it."""

FAILPOINTS = (
    "staging begun",
    "file begun",
    "half a file",
    "file written",
    "tensors stored",
    "before the manifest",
    "half a manifest",
    "after the manifest",
    "before the rename",
    "after the rename",
    "before latest",
    "after latest",
    "before a deletion",
    "half a deletion",
    "after a deletion",
)
"""Where a kill would hurt most, in their order; "file …" and "tensors stored" on every rank, the others on rank 0."""


def failpoint(point: str) -> None:
    """Does nothing; tests put a kill or an error in its place."""
    assert point in FAILPOINTS


class SaveFailed(UserError):
    """A save that failed, on whichever rank: the same words on all of them."""


def run_on_all_ranks(group: dist.ProcessGroup | None, what: str, action: Callable[[], T]) -> T:
    """Do something on every rank; where any rank fails, all raise what failed where. Without a group this process
    is alone."""
    result: list[T] = []
    failure = ""
    try:
        result.append(action())
    except CheckpointException as error:  # no Exception; every rank has it, and it tells whose it was
        cause, _ = error.failures.get(rank_in(group), (None, None))
        failure = _words(cause) if cause else ""
    except Exception as error:
        failure = _words(error)
    everyone = gathered(failure, group)
    if failed := [rank for rank, other in enumerate(everyone) if other]:
        where = f" on rank {', '.join(map(str, failed))}" if group else ""
        raise SaveFailed(f"{what} failed{where}: {everyone[failed[0]]}")
    return result[0]


def rank_in(group: dist.ProcessGroup | None) -> int:
    return dist.get_rank(group) if group else 0


def gathered(mine: T, group: dist.ProcessGroup | None) -> list[T]:
    """What every rank gives, on every rank."""
    everyone = [mine]
    if group:
        everyone *= dist.get_world_size(group)
        dist.all_gather_object(everyone, mine, group=group)
    return everyone


def _words(error: BaseException) -> str:
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {first_line(error)}"


def commit(
    root: Path,
    step: int,
    live: Mapping[str, torch.Tensor],
    held: Mapping[str, torch.Tensor],
    mine: Any,
    documents: Callable[[list[Any]], dict[str, bytes]],
    weights_only: bool,
    group: dist.ProcessGroup | None,
) -> None:
    """Write and publish a checkpoint; all ranks return when it is committed, or raise SaveFailed.

    `live` says how tensors lie on the mesh, `held` has this rank's part of each as it is to be stored. Every rank
    gives something of its own, `mine`; of all of them rank 0 makes the documents that lie beside the tensors.
    """
    rank, staging = rank_in(group), root / f".step-{step}.staging"
    writer = _Writer(staging)

    def publish(everyone: list[Any]) -> None:
        files = {name: file for written, _ in everyone for name, file in written.items()}
        texts = documents([theirs for _, theirs in everyone])
        _publish(root, step, staging, writer.stored, live, files, texts, weights_only)

    try:
        run_on_all_ranks(
            group, f"the save of step {step}", lambda: _begin(root, step, staging) if rank == 0 else None
        )
        run_on_all_ranks(group, f"the save of step {step}", lambda: _store(writer, live, held, group))
        everyone = gathered((writer.written.files, mine), group)
        run_on_all_ranks(group, f"the commit of step {step}", lambda: publish(everyone) if rank == 0 else None)
    except BaseException:
        if rank == 0:
            shutil.rmtree(staging, ignore_errors=True)  # a full disk needs the room
        raise


def _begin(root: Path, step: int, staging: Path) -> None:
    if step_folder(root, step).exists():
        raise UserError(f"{step_folder(root, step)} exists, and nothing is ever written into a checkpoint")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    failpoint("staging begun")


def _store(
    writer: _Writer,
    live: Mapping[str, torch.Tensor],
    held: Mapping[str, torch.Tensor],
    group: dist.ProcessGroup | None,
) -> None:
    """Write this rank's part of the tensors."""
    planner, alone = _Planner(held), group is None
    dcp.save(dict(live), storage_writer=writer, planner=planner, process_group=group, no_dist=alone)
    failpoint("tensors stored")


class _Planner(DefaultSavePlanner):
    """Plans by the live tensors' places, and takes the data from what is held of them."""

    def __init__(self, held: Mapping[str, torch.Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._held = held

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self._held[index.fqn]


class _Writer(dcp.FileSystemWriter):
    """One file a rank, fsynced."""

    def __init__(self, staging: Path) -> None:
        # With more threads, torch 2.11 to 2.13 lose a writer's error; copying ahead waits for the training's stream.
        super().__init__(staging, thread_count=1, per_thread_copy_ahead=0)
        self.fs = self.written = _Files()  # type: ignore[misc]

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta()  # torch's would tell the place where it was written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0: where all ranks' parts lie. (torch 2.11 puts it into a copy that it does not give away.)"""
        super().finish(metadata, results)
        places = {result.index: result.storage_data for of_rank in results for result in of_rank}
        self.stored = replace(metadata, storage_data=places)


class _Files(FileSystem):
    """Local files, with the size and checksum of each that was written."""

    def __init__(self) -> None:
        self.files: dict[str, File] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream, ThreadPoolExecutor(1) as summer:
            failpoint("file begun")
            counted = _Counted(stream, summer)
            yield counted
        self.files[Path(path).name] = File(counted.size, counted.crc32)
        failpoint("file written")

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        super().rename(path, new_path)
        self.files[Path(new_path).name] = self.files.pop(Path(path).name)


class _Counted:
    """A stream that sums what is written to it, at the same time: neither holds the interpreter for long."""

    def __init__(self, stream: Any, summer: Executor) -> None:
        self._stream, self._summer, self.size, self.crc32 = stream, summer, 0, 0
        self.tell, self.flush, self.fileno, self.close = stream.tell, stream.flush, stream.fileno, stream.close

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        summed = self._summer.submit(zlib.crc32, view, self.crc32) if len(view) >= _WORTH_A_THREAD else None
        try:
            done = self._stream.write(view)
        finally:
            crc32 = summed.result() if summed else zlib.crc32(view, self.crc32)  # before the bytes may go
        if done != len(view):
            raise OSError(f"{done} of {len(view)} bytes were written")
        if self.size == 0:
            self._stream.flush()
            failpoint("half a file")
        self.size, self.crc32 = self.size + done, crc32
        return done


def _publish(
    root: Path,
    step: int,
    staging: Path,
    stored: Metadata,
    live: Mapping[str, torch.Tensor],
    files: dict[str, File],
    documents: dict[str, bytes],
    weights_only: bool,
) -> None:
    """Rank 0's part, when every rank has stored its own: JSON, manifest, rename, `latest`."""
    for name, content in documents.items():
        write(staging / name, content)
        files[name] = File(len(content), zlib.crc32(content))
    manifest = Manifest(step, weights_only, files, _tensors(stored, live, files))
    failpoint("before the manifest")
    write(staging / MANIFEST, manifest.render(), halfway="half a manifest")
    failpoint("after the manifest")
    for name, file in files.items():
        if (found := (staging / name).stat().st_size) != file.size:
            raise OSError(f"{name} has {found} bytes, {file.size} were written")
    fsync_folder(staging)
    failpoint("before the rename")
    staging.rename(step_folder(root, step))
    failpoint("after the rename")
    fsync_folder(root)
    point_latest(root, step)


def point_latest(root: Path, step: int) -> None:
    """Let `latest` name a step."""
    failpoint("before latest")
    write(root / ".latest.new", f"step-{step}\n".encode())
    (root / ".latest.new").replace(root / "latest")
    fsync_folder(root)
    failpoint("after latest")


def delete(root: Path, step: int) -> None:
    """Remove a checkpoint: first its name, so that no half of one is ever taken for a whole."""
    failpoint("before a deletion")
    going = root / f".step-{step}.deleted"
    step_folder(root, step).rename(going)
    fsync_folder(root)
    (going / MANIFEST).unlink()
    failpoint("half a deletion")
    shutil.rmtree(going)
    failpoint("after a deletion")


def clear_leftovers(root: Path) -> list[str]:
    """Remove what a killed save, deletion or start left; the names of what there was."""
    found = leftovers(root)
    for path in found:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return [path.name for path in found]


def _tensors(stored: Metadata, live: Mapping[str, torch.Tensor], files: Mapping[str, File]) -> dict[str, Tensor]:
    """Every tensor's entry; an error unless each planned piece of it lies inside a file that was written."""
    entries = {}
    assert stored.state_dict_metadata.keys() == live.keys()
    for name, planned in stored.state_dict_metadata.items():
        assert isinstance(planned, TensorStorageMetadata)
        chunks = []
        for chunk in planned.chunks:
            place = stored.storage_data.get(MetadataIndex(name, chunk.offsets))
            if place is None or place.offset + place.length > files[place.relative_path].size:
                raise OSError(f"{name} at {list(chunk.offsets)} was planned, and is not stored")
            where = (place.relative_path, place.offset, place.length)
            chunks.append(Chunk(tuple(chunk.offsets), tuple(chunk.sizes), *where))
        dtype = str(planned.properties.dtype).removeprefix("torch.")
        entries[name] = Tensor(tuple(planned.size), dtype, _placement(live[name]), tuple(chunks))
    return entries


def _placement(tensor: torch.Tensor) -> str:
    if not isinstance(tensor, DTensor):
        return "whole"
    mesh, names = tensor.device_mesh, tensor.device_mesh.mesh_dim_names or ()
    parts = zip(names, mesh.shape, tensor.placements, strict=True)
    return ", ".join(f"{name} {size}: {placement}" for name, size, placement in parts)


def write(path: Path, content: bytes, halfway: str = "") -> None:
    with path.open("wb") as file:
        file.write(content[: len(content) // 2])
        if halfway:
            file.flush()
            failpoint(halfway)
        file.write(content[len(content) // 2 :])
        file.flush()
        os.fsync(file.fileno())


def fsync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def to_json(value: Any) -> bytes:
    """A document; an error where JSON can't hold it."""
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()
