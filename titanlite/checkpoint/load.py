"""Which checkpoint a run begins from, and loading it: everything is compared before any live tensor is touched.

Nothing is unpickled but tensors, by torch.load(weights_only=True): where they lie says the manifest. (DCP's own
.metadata is a pickle, which we write for other tools and never open.)
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from titanlite.checkpoint.manifest import (
    CONFIG,
    ENVIRONMENT,
    STATE,
    CorruptCheckpoint,
    Manifest,
    committed,
    faults,
    read_manifest,
    read_state,
    split_files_by_size,
    step_folder,
)
from titanlite.checkpoint.state import Numbers, Position, TrainingState
from titanlite.errors import UserError, nearest, some_of


@dataclass(frozen=True)
class Source:
    """A sound checkpoint to begin from."""

    folder: Path
    manifest: Manifest
    position: Position
    streams: dict[str, Any]
    """Of a streamed data set: the position of each data-parallel rank."""
    numbers: Numbers
    resume: bool
    """The run goes on from it; otherwise it takes the weights alone."""


def latest_verified(root: Path, full: bool, group: dist.ProcessGroup, log: logging.Logger) -> Source | None:
    """The newest checkpoint that a run can go on from; damaged ones are named and passed over."""
    steps = _agreed_steps(root, group)
    for step in reversed(steps):
        folder = step_folder(root, step)
        manifest, found = _verify(folder, full, group)
        if manifest and not found and not manifest.weights_only:
            return _source(folder, manifest, resume=True)
        for fault in found or [f"{folder}: holds the weights alone, so a run can't go on from it"]:
            log.warning(f"passed over {fault}")
    if steps:
        raise UserError(
            f"no checkpoint in {root} can be resumed, and there are {len(steps)} (the log names what is wrong with "
            "each): begin anew with another job.dump_folder, or name one of them in checkpoint.initial_load_path"
        )
    return None


def at_step(root: Path, step: int, full: bool, group: dist.ProcessGroup) -> Source:
    """The checkpoint of the step that was asked for, or an error."""
    steps = _agreed_steps(root, group)
    if step not in steps:
        there = f"there are: {', '.join(map(str, steps))}" if steps else "there is none"
        raise UserError(f"checkpoint.load_step = {step}: no such checkpoint in {root}; {there}")
    return _sound("checkpoint.load_step", step_folder(root, step), full, group, resume=True)


def at_path(path: Path, full: bool, group: dist.ProcessGroup, weights_only: bool) -> Source:
    """A checkpoint, or the newest one in a folder of them, from anywhere."""
    key = "checkpoint.initial_load_path"
    steps = _agreed_steps(path, group)
    folder = step_folder(path, steps[-1]) if steps else path
    return _sound(key, folder, full, group, resume=not weights_only)


def _sound(key: str, folder: Path, full: bool, group: dist.ProcessGroup, resume: bool) -> Source:
    manifest, found = _verify(folder, full, group)
    if found or manifest is None:
        raise UserError(f"{key}: {'; '.join(found[:8])}")
    if resume and manifest.weights_only:
        raise UserError(f"{key}: {folder} holds the weights alone, so a run can't go on from it")
    return _source(folder, manifest, resume)


def _source(folder: Path, manifest: Manifest, resume: bool) -> Source:
    state = read_state(folder)
    return Source(folder, manifest, Position(**state["position"]), state["streams"], state["numbers"], resume)


def _agreed_steps(root: Path, group: dist.ProcessGroup) -> list[int]:
    """The committed steps that rank 0 sees."""
    steps = [committed(root) if dist.get_rank() == 0 else []]
    dist.broadcast_object_list(steps, src=0, group=group)
    return steps[0]


def _verify(folder: Path, full: bool, group: dist.ProcessGroup) -> tuple[Manifest | None, list[str]]:
    """The manifest, and what is wrong; with `full` every rank reads an equal share of the bytes, otherwise only what
    is small is read."""
    manifest: Manifest | None = None
    try:
        manifest = read_manifest(folder)
        small = [STATE, CONFIG, ENVIRONMENT]
        mine = split_files_by_size(manifest, dist.get_world_size(group))[dist.get_rank(group)] if full else small
        found = faults(folder, manifest, mine)
    except (CorruptCheckpoint, OSError) as error:
        found = [str(error)]
    everyone: list[list[str]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everyone, found, group=group)
    return manifest, list(dict.fromkeys(fault for theirs in everyone for fault in theirs))


def restore(source: Source, state: TrainingState, exclude: list[str], group: dist.ProcessGroup | None) -> None:
    """Load what a source has into the live tensors, all of it or nothing."""
    saved: dict[str, Any] = {
        name: (list(tensor.shape), tensor.dtype) for name, tensor in source.manifest.tensors.items()
    }
    saved |= dict.fromkeys(source.numbers, "a number")
    live = state.tensors() if source.resume else state.weights()
    wanted: dict[str, Any] = {
        name: (list(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in live.items()
    }
    if source.resume:
        wanted |= dict.fromkeys(state.numbers(), "a number")
    else:
        saved = {name: what for name, what in saved.items() if name.startswith("model.")}
    check_exclude_patterns(exclude, {*saved, *wanted, DATA})
    compared = {name for name in {*saved, *wanted} if not excluded(name, exclude)}
    if found := list(_differences(saved, wanted, compared)):
        raise UserError(
            f"{source.folder} does not fit this run; nothing was loaded. What may differ belongs into "
            f"checkpoint.exclude_from_loading:{some_of(found)}"
        )
    tensors = {name: tensor for name, tensor in live.items() if name in compared}
    _read(source.folder, source.manifest, tensors, group)
    if source.resume:
        state.set_numbers({name: value for name, value in source.numbers.items() if name in compared})


DATA = "data"
"""What stands for the position in the data in checkpoint.exclude_from_loading."""


def excluded(name: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern matches a name or its beginning: "optimizer" means all of the optimizer's."""
    return any(fnmatchcase(name, pattern) or name.startswith(f"{pattern}.") for pattern in patterns)


def check_exclude_patterns(patterns: list[str], names: set[str]) -> None:
    for pattern in patterns:
        if not any(excluded(name, [pattern]) for name in names):
            close = nearest(pattern, names)
            hint = f"did you mean {close}?" if close else f'there are model.NAME, optimizer.NAME.KEY and "{DATA}"'
            raise UserError(f'checkpoint.exclude_from_loading: "{pattern}" matches nothing; {hint}')


def _differences(saved: Mapping[str, Any], wanted: Mapping[str, Any], names: set[str]) -> Iterable[str]:
    for name in sorted(names):
        if name not in saved:
            yield f"{name}: not in the checkpoint"
        elif name not in wanted:
            yield f"{name}: in the checkpoint alone"
        elif saved[name] != wanted[name] and not _converts(name, saved[name], wanted[name]):
            yield f"{name}: {_words(saved[name])} in the checkpoint, {_words(wanted[name])} here"


def _converts(name: str, saved: Any, wanted: Any) -> bool:
    """Whether only optimizer.state_dtype differs, which the log says: reading rounds, or widens, what was saved."""
    if not name.startswith("optimizer.") or isinstance(saved, str) or isinstance(wanted, str):
        return False
    return saved[0] == wanted[0] and {saved[1], wanted[1]} == {"float32", "bfloat16"}


def _words(what: Any) -> str:
    return what if isinstance(what, str) else f"{what[1]} of shape {what[0]}"


def load_weights(folder: Path, model: nn.Module) -> None:
    """A checkpoint's weights into a model that lies whole in this process, all of them or nothing."""
    source = _source(folder, read_manifest(folder), resume=False)
    restore(source, TrainingState([model], optimizer=None), [], group=None)


def load_tensors(
    folder: Path, names: Iterable[str] | None = None, manifest: Manifest | None = None
) -> dict[str, torch.Tensor]:
    """Whole tensors of a checkpoint of any mesh, in this process alone; all of them unless named."""
    manifest = manifest or read_manifest(folder)
    entries = {name: manifest.tensors[name] for name in (manifest.tensors if names is None else names)}
    tensors = {name: torch.empty(entry.shape, dtype=dtype_of(entry.dtype)) for name, entry in entries.items()}
    _read(folder, manifest, tensors, group=None)
    return tensors


def _read(
    folder: Path, manifest: Manifest, tensors: dict[str, torch.Tensor], group: dist.ProcessGroup | None
) -> None:
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        reader = _Reader(folder, manifest)
        dcp.load(tensors, storage_reader=reader, planner=planner, process_group=group, no_dist=group is None)


@dataclass(frozen=True)
class _Place:
    """Where a chunk's bytes are, as torch's reader asks for it (its own class is private; tried on 2.11 and 2.13)."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


class _Reader(dcp.FileSystemReader):
    """Finds tensors by our manifest instead of a pickle."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        super().__init__(folder)
        self._manifest = manifest

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        tensors: dict[str, Any] = {}
        places = {}
        for name, entry in self._manifest.tensors.items():
            chunks = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in entry.chunks]
            properties = TensorProperties(dtype=dtype_of(entry.dtype))
            tensors[name] = TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
            for chunk in entry.chunks:
                if chunk.file not in self._manifest.files:
                    raise CorruptCheckpoint(
                        f"{self.path}: {name} lies in {chunk.file}, which is not part of the checkpoint"
                    )
                places[MetadataIndex(name, chunk.offsets)] = _Place(chunk.file, chunk.offset, chunk.length)
        return Metadata(tensors, storage_data=places)


def dtype_of(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CorruptCheckpoint(f'"{name}" is no type of a tensor')
    return found
