"""Write weights of a run or of a checkpoint into a folder that other tools read.

Files are assigned to ranks in turn. In a round, all ranks gather the tensors of one file per rank,
each keeping its own file's in host memory; then all write at once. So a rank holds the tensors of
one file, at most FILE_BYTES or what a single larger parameter becomes, and the one that is being
gathered; never the model. Under pipeline parallel the ranks of a tensor's stage gather it, and one
of them sends it on. The folder is staged and renamed as a checkpoint is, and its bytes are the same
from any mesh.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from titanlite.checkpoint.commit import run_on_all_ranks, run_on_rank_0, staging_folder
from titanlite.checkpoint.folder import CheckpointFolder
from titanlite.checkpoint.hf.files import INDEX, index, split, write
from titanlite.checkpoint.hf.names import HFTensor, Translation, documents
from titanlite.checkpoint.manifest import Manifest, export_folder
from titanlite.checkpoint.read import dtype_of
from titanlite.checkpoint.state import TrainingState
from titanlite.data.tokenizer import Tokenizer
from titanlite.parallel.lora import merge
from titanlite.registry.lora import adapter_of
from titanlite.runtime import store
from titanlite.runtime.distributed import rank_in
from titanlite.runtime.page import phase

FILE_BYTES = 4 << 30

Fetch = Callable[[str, int], torch.Tensor]
"""Returns the parameter of this name, whole on the rank of this number.

On a mesh all ranks call it together.
"""


def export(
    target: Path,
    tensors: Sequence[HFTensor],
    documents: Mapping[str, bytes],
    fetch: Fetch,
    group: dist.ProcessGroup | None = None,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write a folder of tensors and documents, replacing one of that name.

    It has its name when it is complete.
    """
    what, files = f"the export to {target}", split(tensors, file_bytes)

    def publish() -> None:
        for name, content in {**documents, INDEX: index(files)}.items():
            store.write(staging / name, content)
        replaced = target.parent / f".{target.name}.replaced"
        store.delete(replaced)
        if store.exists(target):
            store.rename(target, replaced)
        store.publish(staging, target)
        with suppress(OSError):
            store.delete(replaced)

    with staging_folder(target, group, what) as staging:
        _write_files(staging, files, fetch, group, what)
        run_on_rank_0(group, what, publish)


def merged(fetch: Fetch, translation: Translation) -> Fetch:
    """Return a function that adds its adapter to each parameter that has one."""

    def fetch_merged(name: str, owner: int) -> torch.Tensor:
        weight = fetch(name, owner)
        a, b = adapter_of(name)
        adapters = translation.adapters
        if adapters is None or a not in translation.shapes:
            return weight
        narrow = fetch(a, owner), fetch(b, owner)
        return merge(weight, *narrow, adapters.scale) if weight.numel() else weight

    return fetch_merged


def _write_files(
    staging: Path,
    files: dict[str, list[HFTensor]],
    fetch: Fetch,
    group: dist.ProcessGroup | None,
    what: str,
) -> None:
    """Round by round, gather and write a file on each rank."""
    world, named_files = dist.get_world_size(group) if group else 1, list(files.items())
    for first in range(0, len(named_files), world):
        own_file, own_tensors = "", {}
        for owner, (file, tensors) in enumerate(named_files[first : first + world]):
            for parameters, made in groupby(tensors, attrgetter("parameters")):
                weights = [fetch(name, owner) for name in parameters]
                if owner == rank_in(group):
                    own_file = file
                    own_tensors |= {tensor.name: tensor.build(weights).cpu() for tensor in made}
                del weights

        # Ranks meet here with the checkpoints' timeout, and never wait for a disk in a group of the
        # training.
        run_on_all_ranks(
            group,
            what,
            partial(write, staging / own_file, own_tensors) if own_file else lambda: None,
        )


@phase("save")
def export_step(
    folder: CheckpointFolder, step: int, state: TrainingState, tokenizer: Tokenizer | None
) -> None:
    """Write a run's weights as they are now, next to its checkpoints."""
    target = export_folder(folder.root, step)
    assert folder.group is not None
    translation = Translation(folder.job.spec, folder.job.model_config)
    # Buffers are refused whatever their values: ranks would have to agree on them.
    translation.refuse([*translation.buffers])
    dtype = getattr(torch, folder.settings.export_dtype)
    export_live(target, translation, state, dtype, tokenizer, folder.group)
    folder.log.info(f"exported step {step} for Hugging Face: {target}")


def export_live(
    target: Path,
    translation: Translation,
    state: TrainingState,
    dtype: torch.dtype,
    tokenizer: Tokenizer | None,
    group: dist.ProcessGroup,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write a Hugging Face folder from a run's own tensors, on any mesh."""
    live, stages = state.weights(), state.stages
    carried = torch.float64 if translation.adapters else dtype  # a sum is rounded once
    device = next(iter(live.values())).device
    # By name, a rank that differs only in pp.
    holders = state.of_all_stages(dict.fromkeys(live, dist.get_rank()))
    line = dist.get_process_group_ranks(stages) if stages else []

    @torch.no_grad()
    def fetch(name: str, owner: int) -> torch.Tensor:
        holder = holders[f"model.{name}"]
        if holder == dist.get_rank():
            tensor = live[f"model.{name}"].detach().to(translation.kept.get(name, carried))
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if owner in line and owner != holder:
                dist.send(full, owner, stages)
            return full
        is_owner = owner == dist.get_rank()
        shape = translation.shapes[name] if is_owner else 0
        full = torch.empty(shape, dtype=carried, device=device)
        if is_owner:
            dist.recv(full, holder, stages)
        return full

    files = documents(translation.config, dtype, tokenizer)
    tensors = translation.hf_tensors(dtype)
    export(target, tensors, files, merged(fetch, translation), group, file_bytes)


def plain_tensors(manifest: Manifest, dtype: torch.dtype) -> list[HFTensor]:
    """Return a checkpoint's weights by their own names; integers keep their type."""
    tensors = []
    for name, entry in manifest.tensors.items():
        if name.startswith("model."):
            saved_dtype, plain_name = dtype_of(entry.dtype), name.removeprefix("model.")
            new_dtype = dtype if saved_dtype.is_floating_point else saved_dtype
            tensors.append(HFTensor(plain_name, (plain_name,), entry.shape, new_dtype))
    return tensors
