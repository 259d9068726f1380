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
    CorruptCheckpoint,
    Manifest,
    committed,
    is_foreign,
)
from titanlite.checkpoint.resume import saved_model
from titanlite.checkpoint.torchtitan.names import Names
from titanlite.config.config_json import read_config
from titanlite.config.load import DEFAULT_CONFIG, load_valid, parse_command_line
from titanlite.config.schema import JobConfig, with_values
from titanlite.config.toml import to_toml
from titanlite.data.fingerprint import fingerprint
from titanlite.errors import UserError, format_bytes, print_notice, some_of
from titanlite.observe.progress import Progress, progress_bar
from titanlite.registry import ModelSpec
from titanlite.registry.lora import Adapters, is_adapter
from titanlite.runtime import store
from titanlite.runtime.bucket import is_remote
from titanlite.tools.checkpoint_torchtitan import export_dcp
from titanlite.tools.load import brought, find_checkpoint, whole_manifest

if TYPE_CHECKING:
    import torch

    from titanlite.checkpoint.hf.names import Translation
    from titanlite.data.tokenizer import Tokenizer


def export(arguments: Namespace) -> int:
    """Write the weights of a checkpoint for other programs."""
    out = arguments.out
    _refuse_existing(out)
    folder = find_checkpoint(arguments.folder)
    with brought(folder) as source:
        contents = None if arguments.verify == "full" else ()
        manifest = whole_manifest(source, contents, "; nothing was exported")
        _export(source, manifest, out, arguments)
    print(f"exported step {manifest.step}: {out}")
    return 0


def _export(folder: Path, manifest: Manifest, target: Path, arguments: Namespace) -> None:
    """Write the weights into a folder."""
    import torch

    from titanlite.checkpoint.base import BaseWeights
    from titanlite.checkpoint.hf.export import export as write_export
    from titanlite.checkpoint.hf.export import merged, plain_tensors
    from titanlite.checkpoint.hf.names import documents as hf_documents
    from titanlite.checkpoint.hf.peft import export_adapters
    from titanlite.checkpoint.load import load_tensors

    def read(name: str) -> torch.Tensor:
        return load_tensors(folder, [name], manifest)[name]

    config = load_valid(parse_command_line(["--config", str(folder / CONFIG)], {})).config
    dtype = getattr(torch, arguments.dtype or config.checkpoint.export_dtype)
    start = config.checkpoint.initial_load_path
    with progress_bar("tensors", "exporting: ") as show:
        if arguments.format == "safetensors":
            tensors = plain_tensors(manifest, dtype)
            documents = {CONFIG: store.read(folder / CONFIG)}
            write_export(target, tensors, documents, _counted(read, len(tensors), show))
            if manifest.base:
                print_notice(f"the adapters alone; their base is {manifest.base.folder}")
        elif arguments.format in ("torchtitan", "dcp"):
            if arguments.dtype:
                raise UserError(f"--dtype has no effect: {arguments.format} keeps each type")
            names = Names(*_model(folder, config, arguments.package))
            whole = arguments.format == "torchtitan"
            fetch = _counted(read, len(manifest.tensors), show, "")
            export_dcp(folder, manifest, target, config, names, fetch, whole)
        else:
            spec, flavor = _model(folder, config, arguments.package)
            translation = _translation(folder, manifest, spec, flavor)
            if manifest.base and arguments.format != "peft":
                base = BaseWeights(manifest.base, arguments.base or start, spec, flavor)
                kind = getattr(torch, config.training.dtype)
                read = base.joined(read, manifest, translation.shapes, kind)
            fetch = _counted(read, len(translation.shapes), show)
            if arguments.format == "peft":
                export_adapters(target, translation, fetch, start)
            else:
                tokenizer = _tokenizer(arguments.tokenizer, config, spec.shape(flavor).vocab_size)
                documents = hf_documents(translation.config, dtype, tokenizer)
                tensors = translation.hf_tensors(dtype)
                write_export(target, tensors, documents, merged(fetch, translation))


def _refuse_existing(out: Path) -> None:
    if store.exists(out):
        raise UserError(f"{out} exists, and an export overwrites nothing")


def _counted(
    read: Callable[[str], torch.Tensor], total: int, show: Progress, prefix: str = "model."
) -> Callable[..., torch.Tensor]:
    """Return a function that fetches a parameter, and shows how many are fetched."""
    fetched = set[str]()

    def fetch(name: str, owner: int = 0) -> torch.Tensor:
        fetched.add(name)
        show(len(fetched), total)
        return read(f"{prefix}{name}")

    return fetch


def _model(folder: Path, config: JobConfig, package: str) -> tuple[ModelSpec, Any]:
    """Return the model that a checkpoint has weights of."""
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


def _translation(folder: Path, manifest: Manifest, spec: ModelSpec, flavor: Any) -> Translation:
    """Return the translation of a checkpoint's weights."""
    from titanlite.checkpoint.hf.names import Translation
    from titanlite.checkpoint.load import load_tensors

    translation = Translation(spec, flavor)
    buffers = {
        name: f"model.{name}" for name in translation.buffers if f"model.{name}" in manifest.tensors
    }
    values = load_tensors(folder, buffers.values(), manifest)
    translation.refuse([name for name, saved_name in buffers.items() if values[saved_name].any()])
    saved = {
        name.removeprefix("model."): t.shape
        for name, t in manifest.tensors.items()
        if name.startswith("model.")
    }
    saved = {name: shape for name, shape in saved.items() if name not in buffers}
    expected = translation.shapes
    if manifest.base:
        expected = {name: shape for name, shape in expected.items() if is_adapter(name)}
    if wrong := [name for name in {**expected, **saved} if expected.get(name) != saved.get(name)]:
        raise CorruptCheckpoint(
            f"{folder} does not hold the weights of the model in its {CONFIG}:{some_of(wrong)}"
        )
    return translation


def _tokenizer(named: str, config: JobConfig, vocab_size: int) -> Tokenizer | None:
    """Return the tokenizer of a folder named by --tokenizer, or the run's own; an error if it is
    not here.
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
    if is_known and (tokenizer := tokenizer_of(config, vocab_size)):
        return tokenizer
    what = f"{' and '.join(folders)} has no tokenizer.json; name its folder with --tokenizer"
    print_notice(f"no tokenizer is exported: {what}")
    return None


def import_folder(arguments: Namespace, *overrides: str) -> int:
    """Write a checkpoint that starts from a Hugging Face folder."""
    import torch

    from titanlite.checkpoint.hf.load import HuggingFaceFolder, to_checkpoint
    from titanlite.observe.run_folder import versions
    from titanlite.registry import get_model

    source, target = arguments.hf_folder, arguments.out
    if committed(target):
        raise UserError(f"{target} has checkpoints already; import into another folder")
    if is_foreign(source):
        raise UserError(f"{source}: {FOREIGN.format(source)}")
    read_config(source)  # without one the error would name model.flavor
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


def copy_folder(source: Any, target: Path) -> int:
    """Copy a folder of others from an object store; what a killed copy has brought stays."""
    if is_remote(target) or store.exists(target):
        raise UserError(
            f"{target}: a folder of Hugging Face or TorchTitan is copied into a new folder here"
        )
    entries = source.below()
    sizes = {name: entry["size"] for name, entry in entries.items()}
    draft = target.with_name(f".{target.name}.{_state_of(source, entries)}.part")
    store.copy_below(source, sizes, draft)
    store.rename(draft, target)
    size = format_bytes(sum(sizes.values()))
    print(f"{source} is now in {target}: {len(sizes)} files, {size}")
    return 0


def _state_of(root: Path, entries: Mapping[str, Any]) -> str:
    """Hash what a list says of files below a place."""
    tags = [(name, e["size"], e.get("e_tag") or e["last_modified"]) for name, e in entries.items()]
    return fingerprint(f"{root} {sorted(tags)}")


def _of_folder(source: Path, argv: list[str], environ: Mapping[str, str]) -> list[str]:
    """Return a command line with the folder's own model, unless a config or a flavor is given."""
    line = parse_command_line(argv, environ)
    is_default = line.files == [DEFAULT_CONFIG] and not line.names_files
    if line.overrides.get("model.flavor", "hf" if is_default else "") != "hf":
        return argv
    return [f"--checkpoint.initial_load_path={source}", "--model.flavor=hf", *argv]
