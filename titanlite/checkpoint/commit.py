"""Write a checkpoint: staged, verified, and published by one rename. No other module does this.

    .step-N.TOKEN.staging/  every rank's tensors, on disk, with the size and checksum of each file;
                       rank 0 adds the JSON documents, and the manifest last
    step-N/            the same folder under its final name, once every planned tensor is stored on
                       every rank
    latest             the newest step's name, for people and scripts; updated after the rename

A bucket has no renames: the files are in step-N/TOKEN/, and the manifest, which names TOKEN, is
created as step-N/manifest.json.

Nothing is ever written into a committed folder. Each rank's work runs under `run_on_all_ranks`:
either all ranks continue, or all raise the same error.
"""

import json
import uuid
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.futures import Future

from titanlite.checkpoint.manifest import (
    MANIFEST,
    Base,
    File,
    Manifest,
    faults,
    point_latest,
    step_folder,
)
from titanlite.checkpoint.stored_tensors import StoredTensor, tensor_file
from titanlite.errors import RunFailed, UserError, first_line
from titanlite.parallel.dtensor import let_go
from titanlite.runtime.bucket import Place
from titanlite.runtime.distributed import gather_objects, rank_in

# DCP warns at each save and load without its collectives, which are not needed here.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")

T = TypeVar("T")


@dataclass(frozen=True)
class Content:
    """What a checkpoint contains besides the tensors, on this rank."""

    step: int
    payload: Any
    """This rank's contribution to the documents."""
    make_documents: Callable[[list[Any]], dict[str, bytes]]
    """On rank 0, makes the files next to the tensors from the payloads of all ranks."""
    weights_only: bool
    confirm: Callable[[], object] = object
    """On rank 0, raises if the run must no longer commit."""
    run: str = ""
    """The name of the run, in a bucket."""
    base: Base | None = None
    """The frozen weights, if they are not among the tensors."""


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
    """Return an error as one line for the user."""
    if isinstance(error, UserError):
        return str(error)
    return f"{type(error).__name__}: {first_line(error)}"


@contextmanager
def staging_folder(target: Place, group: dist.ProcessGroup | None, what: str) -> Iterator[Place]:
    """Make an empty folder for all ranks to write into; discard it if anything fails."""
    # Without a token, two runs in one folder would mix their bytes.
    token = gather_objects(uuid.uuid4().hex[:8], group)[0]
    folder = target.staging(token)

    try:
        run_on_rank_0(group, what, folder.make)
        yield folder
    except BaseException:
        if rank_in(group) == 0:
            with suppress(OSError):
                folder.discard()
        raise


def publish_step(
    staging: Place, target: Place, manifest: Manifest, confirm: Callable[[], object] = object
) -> None:
    """Give a step its manifest and its name; raise if its files are not those of the manifest."""
    (staging / MANIFEST).put(manifest.render())
    problems = faults(staging, manifest)
    if problems:
        raise OSError("; ".join(problems))
    if staging.parent == target:  # in a bucket
        manifest = replace(manifest, attempt=staging.name)
    confirm()
    target.publish(staging, MANIFEST, manifest.render())


class Alone:
    """Methods that DCP requires of storage, and that ranks planning alone do not need."""

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: Any) -> Any:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False


class Writer(Alone, dcp.StorageWriter):
    """Writes a step; `write_data` returns once all ranks have committed it, or raises RunFailed."""

    def __init__(
        self, root: Place, content: Content, group: dist.ProcessGroup | None = None
    ) -> None:
        self._root = root
        self._content = content
        self._group = group
        self._target = step_folder(root, content.step)
        self._saving = f"the save of step {content.step}"

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        run_on_rank_0(self._group, self._saving, self._require_new)

    def _require_new(self) -> None:
        if self._target.is_taken(MANIFEST):
            raise UserError(f"{self._target} exists, and nothing is ever written into a checkpoint")

    def write_data(self, plan: dcp.SavePlan, planner: Any) -> Future[Any]:
        group = self._group
        rank = rank_in(self._group)
        with staging_folder(self._target, group, self._saving) as staging:
            write = partial(_write_tensors, staging / tensor_file(rank), plan, planner)
            written = run_on_all_ranks(group, self._saving, write)
            row = (*written, self._content.payload)
            rows = gather_objects(row, group, only_rank_0=True)
            publish = partial(self._publish, staging, planner.stored, rows)
            run_on_rank_0(group, f"the commit of step {self._content.step}", publish)
        done = Future[Any]()
        done.set_result([])
        return done

    def _publish(self, staging: Place, tensors: dict[str, StoredTensor], rows: list[Any]) -> None:
        content = self._content
        files: dict[str, File] = {}
        payloads = []
        stored = 0
        for rank, (file, nbytes, payload) in enumerate(rows):
            if file:
                files[tensor_file(rank)] = file
            stored += nbytes
            payloads.append(payload)
        planned = sum(tensor.bytes_of(tensor.shape) for tensor in tensors.values())
        if stored != planned:
            raise OSError(f"{planned:,} bytes of tensors were planned, {stored:,} are stored")
        for name, document in content.make_documents(payloads).items():
            (staging / name).put(document)
            files[name] = File(len(document), zlib.crc32(document))
        manifest = Manifest(content.step, content.weights_only, files, tensors)
        manifest = replace(manifest, base=content.base, run=content.run)
        publish_step(staging, self._target, manifest, content.confirm)
        point_latest(self._root, content.step)

    def finish(self, metadata: Any, results: Any) -> None: ...


def alone(function: Callable[..., T], *args: Any, **options: Any) -> T:
    """Call a function of DCP on this rank alone; raise the error that it wraps."""
    try:
        return function(*args, **options, no_dist=True)
    except dcp.CheckpointException as error:
        raise cause(error) from None


def cause(error: BaseException) -> BaseException:
    """Return the error itself; DCP wraps it in an exception that `except Exception` misses."""
    if isinstance(error, dcp.CheckpointException):
        return next(iter(error.failures.values()))[0]
    return error


def _write_tensors(path: Place, plan: Any, planner: Any) -> tuple[File | None, int]:
    """Write what a plan assigns to this rank; return its file and the bytes of its tensors."""

    def blocks() -> Iterator[bytes | memoryview]:
        yield plan.storage_data
        for item in plan.items:
            value = planner.resolve_data(item).cpu().contiguous()
            yield memoryview(value.reshape(-1).view(torch.uint8).numpy())
            let_go(planner.tensors[item.index.fqn])

    if not plan.items:
        return None, 0
    parts = [(item.index.fqn, item.tensor_data.chunk.sizes) for item in plan.items]
    expected = sum(planner.stored[name].bytes_of(sizes) for name, sizes in parts)
    file = File(*path.put_blocks(blocks(), expected))
    return file, file.size - len(plan.storage_data)


def to_json(value: Any) -> bytes:
    """Return a JSON document; raise if JSON cannot represent the value."""
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()
