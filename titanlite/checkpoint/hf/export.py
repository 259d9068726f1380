"""Write the weights of a checkpoint to a folder for other tools.

Files are written one by one, from tensors that are read one by one. A process holds the tensors of
one file in memory (at most FILE_BYTES, or one larger parameter), but never the model. The folder is
staged and renamed like a checkpoint.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from operator import attrgetter
from typing import Any

import torch

from titanlite.checkpoint.base import BaseWeights
from titanlite.checkpoint.commit import run_on_rank_0, staging_folder
from titanlite.checkpoint.folder import CheckpointFolder
from titanlite.checkpoint.hf.files import INDEX, index, split_into_files, write
from titanlite.checkpoint.hf.names import HFTensor, Translation, documents
from titanlite.checkpoint.load import load_tensors
from titanlite.checkpoint.manifest import (
    CONFIG,
    CorruptCheckpoint,
    Manifest,
    export_folder,
    read_manifest,
    step_folder,
)
from titanlite.checkpoint.read import dtype_of
from titanlite.data.tokenizer import Tokenizer
from titanlite.errors import some_of
from titanlite.parallel.lora import merge
from titanlite.registry import ModelSpec
from titanlite.registry.lora import adapter_of, is_adapter
from titanlite.runtime.bucket import Place
from titanlite.runtime.page import phase
from titanlite.runtime.store import LocalPath, rename

FILE_BYTES = 4 << 30

Fetch = Callable[[str], torch.Tensor]
"""Returns a whole parameter by name."""


@phase("save")
def export_step(folder: CheckpointFolder, step: int, tokenizer: Tokenizer | None) -> None:
    """Write the weights of a committed step next to it, on rank 0, while the others wait."""
    target = export_folder(folder.root, step).local()

    def export_it() -> None:
        job = folder.job
        source = step_folder(folder.root, step)
        manifest = read_manifest(source)
        translation = translation_of(source, manifest, job.spec, job.model_config)
        base = None
        if manifest.base:
            given = job.config.checkpoint.initial_load_path
            base = BaseWeights(manifest.base, given, job.spec, job.model_config)
        fetch = weights_of(source, manifest, base, getattr(torch, job.config.training.dtype))
        dtype = getattr(torch, folder.settings.export_dtype)
        files = documents(translation.config, dtype, tokenizer)
        write_folder(target, translation.hf_tensors(dtype), files, merged(fetch, translation))

    run_on_rank_0(folder.group, f"the export to {target}", export_it)
    folder.log.info(f"exported step {step} for Hugging Face: {target}")


def write_folder(
    target: LocalPath,
    tensors: Sequence[HFTensor],
    documents: Mapping[str, bytes],
    fetch: Fetch,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write a folder of tensors and documents; once complete, it replaces one of the same name."""
    files = split_into_files(tensors, file_bytes)
    with staging_folder(target, None, f"the export to {target}") as staging:
        for name, content in files.items():
            built = dict[str, torch.Tensor]()
            for parameters, made in groupby(content, attrgetter("parameters")):
                weights = [fetch(parameter) for parameter in parameters]
                for tensor in made:
                    built[tensor.name] = tensor.build(weights)
                del weights
            write(staging.local() / name, built)
        for name, document in {**documents, INDEX: index(files)}.items():
            (staging / name).put(document)
        replaced = target.with_name(f".{target.name}.replaced")
        replaced.remove()
        if target.exists():
            rename(target, replaced)
        target.publish(staging)
        with suppress(OSError):
            replaced.remove()


def translation_of(folder: Place, manifest: Manifest, spec: ModelSpec, flavor: Any) -> Translation:
    """Return the translation of a checkpoint's weights; raise if they are not the model's."""
    translation = Translation(spec, flavor)
    buffers = {}
    for name in translation.buffers:
        if f"model.{name}" in manifest.tensors:
            buffers[name] = f"model.{name}"
    values = load_tensors(folder, buffers.values(), manifest)
    translation.refuse([name for name, saved_name in buffers.items() if values[saved_name].any()])
    saved = {}
    for full, tensor in manifest.tensors.items():
        name = full.removeprefix("model.")
        if name != full and name not in buffers:
            saved[name] = tensor.shape
    expected = translation.shapes
    if manifest.base:
        expected = {name: shape for name, shape in expected.items() if is_adapter(name)}
    wrong = []
    for name in {**expected, **saved}:
        if expected.get(name) != saved.get(name):
            wrong.append(name)
    if wrong:
        raise CorruptCheckpoint(
            f"{folder} does not hold the weights of the model in its {CONFIG}:{some_of(wrong)}"
        )
    return translation


def weights_of(
    folder: Place,
    manifest: Manifest,
    base: BaseWeights | None = None,
    dtype: torch.dtype = torch.float32,
) -> Fetch:
    """Return a function that reads a parameter from a checkpoint or, in `dtype`, from its base."""

    def fetch(name: str) -> torch.Tensor:
        saved = f"model.{name}"
        if base and saved not in manifest.tensors:
            return base.read_whole(saved).to(dtype)
        return load_tensors(folder, [saved], manifest)[saved]

    return fetch


def merged(fetch: Fetch, translation: Translation) -> Fetch:
    """Return a function that fetches a parameter with its adapter, if any, added."""

    def fetch_merged(name: str) -> torch.Tensor:
        weight = fetch(name)
        a, b = adapter_of(name)
        adapters = translation.adapters
        if adapters is None or a not in translation.shapes:
            return weight
        # In float64, so that the sum is rounded only once.
        return merge(weight.double(), fetch(a), fetch(b), adapters.scale)

    return fetch_merged


def plain_tensors(manifest: Manifest, dtype: torch.dtype) -> list[HFTensor]:
    """Return a checkpoint's weights under their own names; integers keep their type."""
    tensors = []
    for name, entry in manifest.tensors.items():
        if name.startswith("model."):
            saved_dtype = dtype_of(entry.dtype)
            plain_name = name.removeprefix("model.")
            new_dtype = saved_dtype
            if saved_dtype.is_floating_point:
                new_dtype = dtype
            tensors.append(HFTensor(plain_name, (plain_name,), entry.shape, new_dtype))
    return tensors
