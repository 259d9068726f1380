"""Write a checkpoint: staged, verified, and published by one rename. No other module does so.

    .step-N.TOKEN.staging/  every rank's tensors, on the disk, with the size and checksum of each
                       file; rank 0 adds the JSON documents, and the manifest last
    step-N/            the same folder under its final name, once every planned tensor is stored on
                       every rank
    latest             the newest step's name, for people and scripts; updated after the rename

In a bucket, which renames nothing, the files are in step-N/TOKEN/, and the manifest, which names
TOKEN, is created as step-N/manifest.json.

Nothing is ever written into a committed folder. Each rank's work runs under `run_on_all_ranks`:
either all ranks continue, or all raise the same error.
"""

import hashlib
import json
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
from torch.distributed.tensor import DTensor

from titanlite.checkpoint.manifest import (
    MANIFEST,
    Base,
    File,
    Manifest,
    faults,
    point_latest,
    step_folder,
)
from titanlite.checkpoint.places import (
    TYPES,
    Layout,
    Tensor,
    header,
    rank_file,
    sizes_of,
    spread,
    written_by,
)
from titanlite.errors import RunFailed, UserError, first_line
from titanlite.parallel.dtensor import box_of, let_go
from titanlite.registry import Box
from titanlite.runtime import store
from titanlite.runtime.bucket import is_remote
from titanlite.runtime.distributed import gather_objects, rank_in

T = TypeVar("T")


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
    confirm: Callable[[], object] = object
    """On rank 0, raise if the run may not commit any more."""
    run: str = ""
    """The name of the run, in a bucket."""
    base: Base | None = None
    """The weights that are not among the tensors."""


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

    It is deleted if anything fails, since the disk may be full. In a bucket it stays: the answer
    to its manifest may have been lost.
    """
    # Without a token, two runs in one folder would mix their bytes.
    token = gather_objects(uuid.uuid4().hex[:8], group)[0]
    folder = store.staging_folder(target, token)

    try:
        run_on_rank_0(group, what, partial(store.make_folder, folder))
        yield folder
    except BaseException:
        if rank_in(group) == 0 and not is_remote(folder):
            with suppress(OSError):
                store.delete(folder)
        raise


def commit(root: Path, content: Content, group: dist.ProcessGroup | None) -> None:
    """Write and publish a checkpoint; all ranks return when it is committed, or raise RunFailed."""
    step = content.step
    target = step_folder(root, step)
    saving = f"the save of step {step}"

    def begin() -> dict[str, Tensor]:
        if rank_in(group) == 0 and not is_remote(target) and store.exists(target):
            raise UserError(f"{target} exists, and nothing is ever written into a checkpoint")
        return _describe_all(content.tensors)

    def publish() -> None:
        files: dict[str, File] = {}
        payloads = []
        stored = 0
        for rank, (file, nbytes, payload) in enumerate(rows):
            if file:
                files[rank_file(rank)] = file
            stored += nbytes
            payloads.append(payload)
        planned = sum(tensor.bytes_of(tensor.shape) for tensor in tensors.values())
        if stored != planned:
            raise OSError(f"{planned:,} bytes of tensors were planned, {stored:,} are stored")
        for name, document in content.make_documents(payloads).items():
            store.write(staging / name, document)
            files[name] = File(len(document), zlib.crc32(document))
        manifest = Manifest(step, content.weights_only, files, {**tensors}, base=content.base)
        rendered = manifest.render()
        store.write(staging / MANIFEST, rendered)
        if problems := faults(staging, manifest):
            raise OSError("; ".join(problems))
        if staging.parent == target:
            rendered = replace(manifest, attempt=staging.name, run=content.run).render()
        content.confirm()
        store.publish(staging, target, MANIFEST, rendered)
        point_latest(root, step)

    tensors = _agree(run_on_all_ranks(group, saving, begin), group)
    rank = rank_in(group)
    with staging_folder(target, group, saving) as staging:
        path = staging / rank_file(rank)
        written = run_on_all_ranks(
            group, saving, lambda: _write_tensors(path, tensors, content, rank)
        )
        rows = gather_objects((*written, content.payload), group, only_rank_0=True)
        run_on_rank_0(group, f"the commit of step {step}", publish)


def own_regions(
    tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None
) -> dict[str, Box]:
    """Return the regions that this rank would write: each is one rank's."""
    return written_by(rank_in(group), _agree(_describe_all(tensors), group))


def _describe_all(tensors: Mapping[str, torch.Tensor]) -> dict[str, Tensor]:
    layouts: dict[Any, Layout] = {}
    described = {}
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in TYPES:
            raise UserError(f"{name} is of the type {dtype}, which checkpoints do not hold")
        key = None
        if isinstance(tensor, DTensor):
            key = tensor.device_mesh, tensor.placements
        if key not in layouts:
            layouts[key] = layout_of(tensor)
        described[name] = Tensor(tuple(tensor.shape), dtype, layouts[key])
    return described


def layout_of(tensor: torch.Tensor) -> Layout:
    """Return how a tensor is split over a mesh; one that is not has a mesh of one rank."""
    if not isinstance(tensor, DTensor):
        return Layout()
    splits, late = list[tuple[Any, int]](), list[tuple[Any, int]]()
    for axis, placement in enumerate(tensor.placements):
        dim = getattr(placement, "dim", None)  # every kind of shard has one
        # A strided one, of FSDP, splits what tensor parallelism, to the right of it, has split.
        if hasattr(placement, "split_factor"):
            late.insert(0, (dim, axis))
        elif dim is not None:
            splits.append((dim, axis))
    ranks = tensor.device_mesh.mesh
    strides = []
    for axis, size in enumerate(ranks.shape):
        line = ranks.movedim(axis, -1).reshape(-1, size)[0].tolist()
        strides.append(line[1] - line[0] if size > 1 else 1)
    names = tuple(tensor.device_mesh.mesh_dim_names or ())
    first = int(ranks.min())
    return Layout(names, tuple(ranks.shape), tuple(strides), first, (*splits, *late))


def _agree(own: dict[str, Tensor], group: dist.ProcessGroup | None) -> dict[str, Tensor]:
    """Return all ranks' tensors, as the lowest rank of each describes it, shared out over copies.

    Ranks that describe theirs alike, all of a stage, send it once.
    """
    digest = hashlib.sha256(repr(own).encode()).digest()
    is_first = gather_objects(digest, group).index(digest) == rank_in(group)
    tables = gather_objects(own if is_first else {}, group, only_rank_0=True)
    merged: dict[str, Tensor] = {}
    if rank_in(group) == 0:
        for rank, table in enumerate(tables):
            for name, tensor in table.items():
                if tensor.layout == Layout():
                    tensor = replace(tensor, layout=Layout(first=rank))
                merged.setdefault(name, tensor)
        merged = spread(merged)
    if group:
        shared = [merged]
        dist.broadcast_object_list(shared, src=0, group=group)
        merged = shared[0]
    return merged


def _write_tensors(
    path: Path, tensors: Mapping[str, Tensor], content: Content, rank: int
) -> tuple[File | None, int]:
    """Write this rank's part of the tensors; return its file, and how many bytes are of tensors."""
    regions = written_by(rank, tensors)
    begin = header(tensors, regions)

    def blocks() -> Iterator[bytes | memoryview]:
        yield begin
        for name, region in regions.items():
            value = content.lookup(name)
            planned = (region, f"torch.{tensors[name].dtype}", sizes_of(region))
            found = (box_of(content.tensors[name]), str(value.dtype), tuple(value.shape))
            if planned != found:
                raise RuntimeError(f"{name}: {planned} was planned, and there is {found}")
            block: Any = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            yield memoryview(block)
            let_go(content.tensors[name])

    if not regions:
        return None, 0
    expected = sum(tensors[name].bytes_of(sizes_of(region)) for name, region in regions.items())
    file = File(*store.write_and_sum(path, blocks(), expected))
    return file, file.size - len(begin)


def to_json(value: Any) -> bytes:
    """Return a JSON document; raise if JSON cannot hold the value."""
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()
