"""The base of adapters: frozen weights that a checkpoint names, and does not hold.

A name is not enough, since a folder may get other weights. So the checkpoint has a fingerprint of
the values, which is the same on every mesh, and whoever reads the base compares it.
"""

import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titanlite.checkpoint.commit import run_on_all_ranks
from titanlite.checkpoint.folder import CheckpointFolder
from titanlite.checkpoint.hf.load import HuggingFaceFolder
from titanlite.checkpoint.layouts import own_regions
from titanlite.checkpoint.manifest import MANIFEST, Base, Manifest, read_manifest
from titanlite.checkpoint.read import dtype_of, read
from titanlite.checkpoint.resume import Resume
from titanlite.checkpoint.root import checkpoints_of
from titanlite.checkpoint.state import TrainingState
from titanlite.errors import UserError
from titanlite.parallel.dtensor import local_part
from titanlite.registry import Box, ModelSpec
from titanlite.runtime import store
from titanlite.runtime.bucket import is_remote, place
from titanlite.runtime.distributed import gather_objects

_BLOCK = 1 << 18  # elements whose places are in memory at once
_KEY = "checkpoint.initial_load_path (checkpoint export: --base)"
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def settle(folder: CheckpointFolder, resume: Resume, state: TrainingState) -> Base | None:
    """Read the base that a checkpoint names, or name the weights that a run starts from.

    None if the checkpoints of the run hold all weights themselves.
    """
    job = folder.job
    named = resume.manifest.base if resume.manifest else None
    if named and named != folder.base:  # a rewind finds it in place
        given = job.config.checkpoint.initial_load_path
        BaseWeights(named, given, job.spec, job.model, folder.group).fill(state.frozen())
    if named:
        return named
    is_whole = resume.continues or resume.exclude or not folder.settings.enable
    if is_whole or resume.foreign or not job.config.lora.rank or not resume.folder:
        return None
    start = resume.folder if is_remote(resume.folder) else os.path.abspath(resume.folder)
    return Base(str(start), _shown(digest(state.frozen(), folder.group)))


class BaseWeights:
    """The base that a checkpoint names, opened; with a group all its ranks call every method."""

    def __init__(
        self,
        base: Base,
        given: str,
        spec: ModelSpec,
        model: Any,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Find it where it was or, if it was moved, in the folder `given`."""
        self._base = base
        self._group = group
        self._manifest: Manifest | None = None
        self._hf: HuggingFaceFolder | None = None

        def open_folder() -> None:
            self.folder = _find(base, given)
            if store.exists(self.folder / MANIFEST):
                self._manifest = read_manifest(self.folder)
            else:
                self._hf = HuggingFaceFolder(self.folder, spec, model)

        run_on_all_ranks(group, "opening the base of the adapters", open_folder, UserError)

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Read this rank's parts of all its weights; raise unless their values are as they were."""
        self.read(tensors)
        self.compare(digest(tensors, self._group))

    def read(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Read this rank's parts of some of its weights."""
        if self._manifest:
            read(self.folder, self._manifest, tensors, self._group)
        elif self._hf:
            self._hf.fill(tensors)

    def joined(
        self,
        read_own: Callable[[str], torch.Tensor],
        own: Manifest,
        shapes: Mapping[str, Sequence[int]],
        dtype: str,
    ) -> Callable[[str], torch.Tensor]:
        """Return a function that reads one tensor of a checkpoint or, verified now, of its base."""

        def read(name: str) -> torch.Tensor:
            if name in own.tensors:
                return read_own(name)
            tensor = torch.empty(tuple(shapes[name]), dtype=dtype_of(dtype))
            self.read({name: tensor})
            return tensor

        absent = shapes.keys() - own.tensors.keys()
        self.compare(sum(digest({name: read(name)}, None) for name in absent))
        return read

    def compare(self, total: int) -> None:
        """Raise unless this is the digest of all its weights."""
        if (found := _shown(total)) != self._base.fingerprint:
            raise UserError(
                f"{self.folder} has weights of the fingerprint {found}, and the adapters were "
                f"trained with {self._base.fingerprint}: name the folder of those in {_KEY}, "
                "and keep training.dtype"
            )


def _find(base: Base, given: str) -> Path:
    for folder in _places(base, given):
        if store.exists(folder / MANIFEST) or store.exists(folder / "config.json"):
            return folder
    why = f"has no {Path(base.folder).name}" if store.exists(place(given)) else "does not exist"
    raise UserError(
        f"the adapters were trained with the weights of {base.folder}, which are not there"
        f"{given and f', and {given} {why}'}: name their folder in {_KEY}"
    )


def _places(base: Base, given: str) -> Iterator[Path]:
    """Yield where the base was, and where it may be in a folder of weights or of a run."""
    was = place(base.folder)
    yield was
    if given:
        moved = place(given)
        yield moved / was.name
        yield moved
        yield from (step for step in checkpoints_of(moved) if step.name == was.name)


def digest(tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None) -> int:
    """Return a sum over the bits of each value, times odd numbers of its place and its name."""
    total = 0
    for name, region in own_regions(tensors, group).items():
        of_tensor = _sum(local_part(tensors[name]), region, tensors[name].shape)
        total += of_tensor * (zlib.crc32(name.encode()) | 1)
    return sum(gather_objects(total, group))


@torch.no_grad()
def _sum(values: torch.Tensor, region: Box, shape: torch.Size) -> int:
    """Return the sum for a region of a tensor; integers of 64 bits wrap around."""
    bits = values.contiguous().view(_INTEGERS[values.element_size()])
    column, *rest = [
        torch.arange(each.start, each.stop, device=bits.device) * prod(shape[dim + 1 :])
        for dim, each in enumerate(region)
    ]
    within = torch.zeros((), dtype=torch.int64, device=bits.device)
    for line in rest:
        within = within.unsqueeze(-1) + line
    rows = max(1, _BLOCK // within.numel())
    within = 2 * within + 1
    total = within.new_zeros(())
    for block, starts in zip(bits.split(rows), column.split(rows), strict=True):
        odd = within + 2 * starts.view(-1, *[1] * len(rest))
        total += odd.mul_(block).sum()
    return int(total)


def _shown(total: int) -> str:
    return f"{total % 2**64:016x}"
