"""The base of adapters: frozen weights that a checkpoint names but does not contain.

A name is not enough, since a folder may be overwritten with other weights. So the checkpoint
contains a fingerprint of the base's files, which is compared when the base is read.
"""

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from titanlite.checkpoint.commit import run_on_all_ranks
from titanlite.checkpoint.folder import CheckpointFolder
from titanlite.checkpoint.hf.load import HuggingFaceFolder
from titanlite.checkpoint.load import load_tensors
from titanlite.checkpoint.manifest import MANIFEST, Base, Manifest, read_manifest
from titanlite.checkpoint.read import read
from titanlite.checkpoint.resume import Resume
from titanlite.checkpoint.root import checkpoints_of
from titanlite.checkpoint.state import TrainingState
from titanlite.errors import UserError
from titanlite.registry import ModelSpec
from titanlite.runtime.bucket import Place, place
from titanlite.runtime.distributed import gather_objects
from titanlite.runtime.store import LocalPath, crc32

_KEY = "checkpoint.initial_load_path (checkpoint export: --base)"


def settle(folder: CheckpointFolder, resume: Resume, state: TrainingState) -> Base | None:
    """Read the base that a checkpoint names, or make the weights that a run starts from its base.

    Return None if the run's checkpoints contain all weights.
    """
    job = folder.job
    named = None
    if resume.manifest:
        named = resume.manifest.base
    if named and named != folder.base:  # in a rewind it is already loaded
        given = job.config.checkpoint.initial_load_path
        BaseWeights(named, given, job.spec, job.model_config, folder.group).read(state.frozen())
    if named:
        return named
    is_whole = resume.continues or resume.exclude or not folder.settings.enable
    if is_whole or resume.foreign or not job.config.lora.rank or not resume.folder:
        return None
    return Base(str(resume.folder.absolute()), folder_fingerprint(resume.folder, folder.group))


class BaseWeights:
    """The opened base of a checkpoint; with a group, all its ranks call every method."""

    def __init__(
        self,
        base: Base,
        given: str,
        spec: ModelSpec,
        model: Any,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Find the base in its original place or, if it was moved, in the folder `given`; raise if
        its files are different.
        """
        self._group = group
        self._manifest: Manifest | None = None
        self._hf: HuggingFaceFolder | None = None

        def open_folder() -> None:
            self.folder = _find(base, given)
            if (self.folder / MANIFEST).exists():
                self._manifest = read_manifest(self.folder)
            else:
                self._hf = HuggingFaceFolder(self.folder.local(), spec, model)

        run_on_all_ranks(group, "opening the base of the adapters", open_folder, UserError)
        found = folder_fingerprint(self.folder, group)
        if found != base.fingerprint:
            raise UserError(
                f"{self.folder} has the fingerprint {found}, but the adapters were trained with "
                f"{base.fingerprint}: name the folder with that one in {_KEY}"
            )

    def read(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Read this rank's parts of some of the weights."""
        if self._manifest:
            read(self.folder, self._manifest, tensors, self._group)
        elif self._hf:
            self._hf.fill(tensors)

    def read_whole(self, name: str) -> torch.Tensor:
        """Read one whole weight in this process."""
        if self._hf:
            return self._hf.read(name.removeprefix("model."))
        return load_tensors(self.folder, [name], self._manifest)[name]


def folder_fingerprint(folder: Place, group: dist.ProcessGroup | None) -> str:
    """Return a checksum over those of the files with weights: a checkpoint's manifest has them, and
    of a Hugging Face folder each rank sums its share.
    """
    sums = dict[str, int]()
    if (folder / MANIFEST).exists():
        for name, file in read_manifest(folder, outline=True).files.items():
            sums[name] = file.crc32
    else:
        for part in gather_objects(_own_sums(folder.local(), group), group):
            sums |= part
    weights = []
    for name in sorted(sums):
        if name.endswith(".safetensors"):
            weights.append((name, sums[name]))
    return f"{zlib.crc32(repr(weights).encode()):08x}"


def _own_sums(folder: LocalPath, group: dist.ProcessGroup | None) -> dict[str, int]:
    """Return the checksums of this rank's share of a folder's files."""
    files = sorted(folder.glob("*.safetensors"))
    if group:
        files = files[dist.get_rank(group) :: dist.get_world_size(group)]

    def sums() -> dict[str, int]:
        return {file.name: crc32(file.blocks()) for file in files}

    return run_on_all_ranks(group, "reading the base of the adapters", sums, UserError)


def _find(base: Base, given: str) -> Place:
    for folder in _candidate_folders(base, given):
        if (folder / MANIFEST).exists() or (folder / "config.json").exists():
            return folder
    also = ""
    if given and place(given).exists():
        also = f", and {given} has no {place(base.folder).name}"
    elif given:
        also = f", and {given} does not exist"
    raise UserError(
        f"the adapters were trained with the weights of {base.folder}, which are gone{also}: "
        f"name their folder in {_KEY}"
    )


def _candidate_folders(base: Base, given: str) -> Iterator[Place]:
    """Yield where the base was, and where it may be in a folder of weights or of a run."""
    was = place(base.folder)
    yield was
    if given:
        moved = place(given)
        yield moved / was.name
        yield moved
        yield from (step for step in checkpoints_of(moved) if step.name == was.name)
