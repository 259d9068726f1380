"""`titanlite checkpoint export` and `import`: Hugging Face's format, and plain safetensors."""

from __future__ import annotations

import os
import shlex
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlite.checkpoint.manifest import (
    CONFIG,
    FOREIGN,
    Manifest,
    committed,
    is_foreign,
    read_document,
)
from titanlite.checkpoint.resume import saved_model
from titanlite.checkpoint.torchtitan.names import Names
from titanlite.config.config_json import read_config
from titanlite.config.load import DEFAULT_CONFIG, load_valid, parse_command_line
from titanlite.config.schema import JobConfig, with_values
from titanlite.config.toml import to_toml
from titanlite.errors import UserError, print_notice
from titanlite.observe.progress import Progress, progress_bar
from titanlite.registry import ModelSpec
from titanlite.registry.lora import Adapters
from titanlite.runtime.bucket import Place, copy_below
from titanlite.runtime.store import LocalPath
from titanlite.tools.checkpoint_torchtitan import export_dcp
from titanlite.tools.load import brought, find_checkpoint, whole_manifest

if TYPE_CHECKING:
    import torch

    from titanlite.data.tokenizer import Tokenizer


def export(arguments: Namespace) -> int:
    """Write the weights of a checkpoint for other programs."""
    out = arguments.out
    _refuse_existing(out)
    folder = find_checkpoint(arguments.folder)
    with brought(folder) as files:
        manifest = whole_manifest(folder, arguments.verify == "full", "; nothing was exported")
        config = load_valid(parse_command_line(["--config", str(files / CONFIG)], {})).config
        _export(folder, manifest, config, out, arguments)
    print(f"exported step {manifest.step}: {out}")
    return 0


def _export(
    folder: Place, manifest: Manifest, config: JobConfig, target: LocalPath, arguments: Namespace
) -> None:
    """Write the weights into a folder."""
    import torch

    from titanlite.checkpoint.hf.export import plain_tensors, weights_of, write_folder
    from titanlite.checkpoint.load import load_tensors

    def read(name: str) -> torch.Tensor:
        return load_tensors(folder, [name], manifest)[name]

    dtype = getattr(torch, arguments.dtype or config.checkpoint.export_dtype)
    with progress_bar("tensors", "exporting: ") as show:
        if arguments.format == "safetensors":
            tensors = plain_tensors(manifest, dtype)
            documents = {CONFIG: read_document(folder, CONFIG)}
            fetch = _counted(weights_of(folder, manifest), len(tensors), show)
            write_folder(target, tensors, documents, fetch)
            if manifest.base:
                print_notice(f"the adapters alone; their base is {manifest.base.folder}")
        elif arguments.format in ("torchtitan", "dcp"):
            if arguments.dtype:
                raise UserError(f"--dtype has no effect: {arguments.format} keeps each type")
            names = Names(*_model(folder, config, arguments.package))
            whole = arguments.format == "torchtitan"
            fetch = _counted(read, len(manifest.tensors), show)
            export_dcp(folder, manifest, target, config, names, fetch, whole)
        else:
            _export_hf(folder, manifest, target, arguments, config, dtype, show)


def _export_hf(
    folder: Place,
    manifest: Manifest,
    target: LocalPath,
    arguments: Namespace,
    config: JobConfig,
    dtype: torch.dtype,
    show: Progress,
) -> None:
    """Write the weights for transformers, or the adapters for peft."""
    import torch

    from titanlite.checkpoint.base import BaseWeights
    from titanlite.checkpoint.hf.export import merged, translation_of, weights_of, write_folder
    from titanlite.checkpoint.hf.names import documents as hf_documents
    from titanlite.checkpoint.hf.peft import export_adapters

    start = config.checkpoint.initial_load_path
    spec, flavor = _model(folder, config, arguments.package)
    translation = translation_of(folder, manifest, spec, flavor)
    total = len(translation.shapes)
    if arguments.format == "peft":
        fetch = _counted(weights_of(folder, manifest), total, show)
        export_adapters(target, translation, fetch, start)
        return
    base = None
    if manifest.base:
        base = BaseWeights(manifest.base, arguments.base or start, spec, flavor)
    read = weights_of(folder, manifest, base, getattr(torch, config.training.dtype))
    fetch = merged(_counted(read, total, show), translation)
    tokenizer = _tokenizer(arguments.tokenizer, config)
    documents = hf_documents(translation.config, dtype, tokenizer)
    write_folder(target, translation.hf_tensors(dtype), documents, fetch)


def _refuse_existing(out: LocalPath) -> None:
    if out.exists():
        raise UserError(f"{out} exists, and an export overwrites nothing")


def _counted(
    read: Callable[[str], torch.Tensor], total: int, show: Progress
) -> Callable[[str], torch.Tensor]:
    """Return a function that reads a tensor, and shows how many have been read."""
    fetched = set[str]()

    def fetch(name: str) -> torch.Tensor:
        fetched.add(name)
        show(len(fetched), total)
        return read(name)

    return fetch


def _model(folder: Place, config: JobConfig, package: str) -> tuple[ModelSpec, Any]:
    """Return the model whose weights a checkpoint contains."""
    from titanlite.registry import get_model

    if config.model.package and not package:
        raise UserError(
            f'{folder}: the model is in the package "{config.model.package}", '
            f"which is imported only if you name it: --model.package {config.model.package}"
        )
    spec = get_model(config.model.name, package)
    spec = replace(spec, adapters=Adapters.of(config.lora))
    # A flavor may have been edited since.
    overrides = {**config.model.overrides, **saved_model(folder)}
    return spec, spec.configure(config.model.flavor, overrides)


def _tokenizer(named: str, config: JobConfig) -> Tokenizer | None:
    """Return the tokenizer of a folder named by --tokenizer, or the run's own; raise if it is
    missing.
    """
    from titanlite.data.tokenizer import load_tokenizer, tokenizer_of

    if named:
        return load_tokenizer(named, "--tokenizer")
    sources, assets = config.training.sources, config.model.hf_assets_path
    folders = (
        [assets] if assets else [part.dataset_path for part in sources if part.dataset == "tokens"]
    )
    here = [folder for folder in folders if (Path(folder) / "tokenizer.json").is_file()]
    is_known = here or (not assets and all(map(os.path.exists, folders)))
    if is_known and (tokenizer := tokenizer_of(config)):
        return tokenizer
    what = f"{' and '.join(folders)} has no tokenizer.json; name its folder with --tokenizer"
    print_notice(f"no tokenizer is exported: {what}")
    return None


def import_folder(arguments: Namespace, *overrides: str) -> int:
    """Write a checkpoint with the weights of a Hugging Face folder."""
    import torch

    from titanlite.checkpoint.hf.load import HuggingFaceFolder, to_checkpoint
    from titanlite.observe.run_folder import versions
    from titanlite.registry import get_model

    source, target = arguments.hf_folder, arguments.out
    if committed(target):
        raise UserError(f"{target} has checkpoints already; import into another folder")
    if is_foreign(source):
        raise UserError(f"{source}: {FOREIGN.format(source)}")
    read_config(source)  # otherwise the error would name model.flavor
    config = load_valid(
        parse_command_line(_of_folder(source, [*overrides], os.environ), os.environ)
    ).config
    if config.checkpoint.initial_load_path == str(source):
        unset = {"checkpoint.initial_load_path": "", "checkpoint.initial_load_in_hf": False}
        config = with_values(config, unset)
    spec = get_model(config.model.name, config.model.package)
    flavor = spec.configure(config.model.flavor, config.model.overrides)
    weights = HuggingFaceFolder(source, spec, flavor)
    environment = {
        "versions": versions(),
        "mesh": {},
        "model": asdict(flavor),
        "imported_from": str(source),
    }
    dtype = getattr(torch, config.training.dtype)
    folder = to_checkpoint(weights, target, dtype, to_toml(config), environment)
    print(f"imported {len(weights.names)} tensors: {folder}")
    options = ["--config", str(folder / CONFIG), "--checkpoint.initial_load_path", str(target)]
    print(f"to start from them: {shlex.join(options)}")
    return 0


def copy_folder(source: Place, target: Place) -> int:
    """Copy another program's folder."""
    from titanlite.checkpoint.commit import staging_folder

    folder = target.local()
    if folder.exists():
        raise UserError(
            f"{folder}: a folder of Hugging Face or TorchTitan is copied into a new folder here"
        )
    with staging_folder(folder, None, "the copy") as staging:
        copy_below(source, staging)
        folder.publish(staging)
    print(f"{source} is now in {folder}")
    return 0


def _of_folder(source: LocalPath, argv: list[str], environ: Mapping[str, str]) -> list[str]:
    """Return a command line with the folder's own model, unless a config or a flavor is given."""
    line = parse_command_line(argv, environ)
    is_default = line.files == [DEFAULT_CONFIG] and not line.names_files
    default = "hf" if is_default else ""
    if line.overrides.get("model.flavor", default) != "hf":
        return argv
    return [f"--checkpoint.initial_load_path={source}", "--model.flavor=hf", *argv]
