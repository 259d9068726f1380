"""`titanlite checkpoint …`: looks at checkpoints of any mesh, and moves weights in and out, without process groups.

No code of a folder runs: it is JSON, TOML, and tensors read as tensors. A package that its config names is imported
only when the command line names it too.
"""

from __future__ import annotations

import json
import os
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from titanlite.checkpoint.manifest import (
    CONFIG,
    ENVIRONMENT,
    MANIFEST,
    CorruptCheckpoint,
    Manifest,
    Tensor,
    committed,
    faults,
    is_complete,
    latest_complete,
    read_manifest,
    read_state,
    step_folder,
    step_of,
)
from titanlite.config.load import ConfigError, load, parse_command_line
from titanlite.config.schema import JobConfig
from titanlite.config.toml import to_toml
from titanlite.data.tokenizer import printable
from titanlite.errors import UserError, format_bytes, format_table, some_of
from titanlite.observe.metrics import duration

_SHOWN = 10
_FOLDER = "a checkpoint (…/step-N), a folder of them (its latest complete one is used), or a run's dump folder"


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the sub-commands."""
    commands = parser.add_subparsers(metavar="|".join(_COMMANDS), required=True)

    def command(name: str, about: str, example: str) -> ArgumentParser:
        sub = commands.add_parser(
            name, help=about, description=about, epilog=f"example: titanlite checkpoint {example}"
        )
        sub.set_defaults(command=name)
        return sub

    ls = command("ls", "list steps, size, mesh, age and state", "ls outputs --full")
    ls.add_argument("folder", nargs="?", type=Path, default=Path("outputs"), metavar="FOLDER", help=_FOLDER)
    ls.add_argument("--full", action="store_true", help="read every byte")
    verify = command("verify", "read every byte; exit code 1 if a checksum differs", "verify outputs")
    verify.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help=_FOLDER)
    show = command("show", "print the step, the position in the data, tensors and config", "show outputs")
    show.add_argument("folder", type=Path, metavar="FOLDER", help=_FOLDER)
    diff = command("diff", "print the first tensors that differ; exit code 1 if any does", "diff outputs/a outputs/b")
    diff.add_argument("a", type=Path, metavar="A", help=_FOLDER)
    diff.add_argument("b", type=Path, metavar="B", help=_FOLDER)

    out = command(
        "export", "write the weights in Hugging Face's format, or as plain safetensors", "export outputs hf"
    )
    out.add_argument("folder", type=Path, metavar="FOLDER", help=_FOLDER)
    out.add_argument("out", type=Path, metavar="OUT", help="a folder that does not exist")
    out.add_argument("--format", choices=("hf", "safetensors"), default="hf", help="default: hf")
    dtypes = ("float32", "bfloat16", "float16")
    out.add_argument("--dtype", choices=dtypes, help="default: the config's checkpoint.export_dtype")
    out.add_argument("--tokenizer", default="", metavar="FOLDER", help="default: the config's model.hf_assets_path")
    out.add_argument(
        "--verify", choices=("full", "sizes"), default="full", help="what to check first (default: full)"
    )
    about = "the package the model is in; needed if the checkpoint's config names one"
    out.add_argument("--model.package", dest="package", default="", metavar="NAME", help=about)

    about = "read a Hugging Face folder into a checkpoint for checkpoint.initial_load_path"
    into = command("import", about, "import Llama-3.2-1B start --model.flavor 1B")
    into.epilog = f"{into.epilog}\n\nThe model is named by config keys: [--config FILE.toml …] [--model.KEY VALUE …]"
    into.add_argument("folder", type=Path, metavar="HF_FOLDER", help="config.json and *.safetensors")
    into.add_argument("out", type=Path, metavar="OUT", help="where step-0 is written")
    into.set_defaults(takes_overrides=True)

    rm = command("rm", "remove checkpoints, but never the last complete one", "rm outputs/checkpoint/step-500")
    rm.add_argument("folders", nargs="+", type=Path, metavar="STEP_FOLDER", help="named step-N")
    rm.add_argument("--dry-run", action="store_true", help="only print what would be removed")
    rm.add_argument("--force", action="store_true", help="even the last complete one")


def run(arguments: Namespace, overrides: list[str]) -> int:
    """Run a sub-command."""
    return _COMMANDS[arguments.command](arguments, overrides)


# ---------------------------------------------------------------- which folders are meant


def find_checkpoints(path: Path) -> list[Path]:
    """Return a checkpoint, or those of a folder or a run, oldest first."""
    if (path / MANIFEST).is_file() or step_of(path.name) is not None:
        return [path]
    for root in (path, path / "checkpoint"):
        if steps := committed(root):
            return [step_folder(root, step) for step in steps]
    raise UserError(f"there is no checkpoint in {path}")


def find_checkpoint(path: Path) -> Path:
    """Return a checkpoint, or the latest complete one of a folder or a run."""
    found = find_checkpoints(path)
    return found[0] if len(found) == 1 else next((f for f in reversed(found) if is_complete(f)), found[-1])


# ---------------------------------------------------------------- looking


def _ls(arguments: Namespace, overrides: list[str]) -> int:
    rows = []
    for folder in find_checkpoints(arguments.folder):
        found = _faults(folder, full=arguments.full)
        size, mesh = "?", "?"
        if (folder / MANIFEST).is_file() and not (found and MANIFEST in found[0]):
            manifest = read_manifest(folder)
            size = format_bytes(manifest.size) + (", weights" if manifest.weights_only else "")
            mesh = _mesh(folder)
        verdict = f"damaged: {found[0]}" if found else "sound" if arguments.full else "whole"
        rows.append((folder.name, size, mesh, f"{duration(time.time() - folder.stat().st_mtime)} ago", verdict))
    _print_table(("step", "size", "mesh", "age", "state"), rows)
    return 0


def _verify(arguments: Namespace, overrides: list[str]) -> int:
    bad = 0
    for folder in (folder for path in arguments.folders for folder in find_checkpoints(path)):
        found = _faults(folder, full=True)
        bad += bool(found)
        print(f"{folder}: " + (f"damaged{some_of(found)}" if found else "sound"))
    return 1 if bad else 0


def _faults(folder: Path, full: bool) -> list[str]:
    try:
        manifest = read_manifest(folder)
        return faults(folder, manifest, manifest.files if full else ())
    except (CorruptCheckpoint, OSError) as error:
        return [str(error)]


def _show(arguments: Namespace, overrides: list[str]) -> int:
    folder = find_checkpoint(arguments.folder)
    manifest, state, environment = read_manifest(folder), read_state(folder), _environment(folder)
    optimizer = {name: t for name, t in manifest.tensors.items() if name.startswith("optimizer.")}
    kinds = sorted({name.rpartition(".")[2] for name in optimizer})
    print(f"{folder}: step {manifest.step}, {format_bytes(manifest.size)} in {len(manifest.files)} files")
    print(f"data       {', '.join(f'{key} {value}' for key, value in state['position'].items())}")
    print(f"mesh       {_mesh(folder)}")
    print(f"versions   {', '.join(f'{key} {value}' for key, value in environment.get('versions', {}).items())}")
    what = f"{', '.join(kinds)} in {len(optimizer)} tensors" if optimizer else "none: the weights alone"
    print(f"optimizer  {what}\n")
    rows = [
        (name, tensor.dtype, str(list(tensor.shape)), tensor.placement)
        for name, tensor in manifest.tensors.items()
        if name.startswith("model.")
    ]
    _print_table(("tensor", "type", "shape", "placement"), rows)
    print("\n" + printable((folder / CONFIG).read_text(encoding="utf-8")), end="")
    return 0


def _diff(arguments: Namespace, overrides: list[str]) -> int:
    from titanlite.checkpoint.load import load_tensors

    sides = [find_checkpoint(path) for path in (arguments.a, arguments.b)]
    a, b = manifests = [read_manifest(side) for side in sides]
    rows: list[tuple[str, str]] = []
    for name in sorted(a.tensors.keys() | b.tensors.keys()):
        if name not in a.tensors or name not in b.tensors:
            rows.append((name, f"in {sides[name in b.tensors]} alone"))
        elif (what := _what(a.tensors[name])) != (other := _what(b.tensors[name])):
            rows.append((name, f"{what}, {other}"))
        else:
            pairs = zip(sides, manifests, strict=True)
            one, two = (load_tensors(side, [name], manifest)[name] for side, manifest in pairs)
            if not one.equal(two):
                apart = (one.double() - two.double()).abs()
                count = f"{int((apart != 0).sum()):,} of {one.numel():,} numbers"
                rows.append((name, f"{count}, by {apart.max():.3g} at most"))
    x, y = (read_state(side)["numbers"] for side in sides)
    others = sum(x.get(name) != y.get(name) for name in x.keys() | y.keys())
    if not rows and not others:
        print(f"the same {len(a.tensors)} tensors")
        return 0
    if rows:
        _print_table(("tensor", "differs"), rows[:_SHOWN])
    total = len(a.tensors.keys() | b.tensors.keys())
    print(f"{len(rows)} of {total} tensors differ, and {others} of the optimizer's single numbers")
    return 1


def _what(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


# ---------------------------------------------------------------- out and in


def _export(arguments: Namespace, overrides: list[str]) -> int:
    folder, target = find_checkpoint(arguments.folder), arguments.out
    if target.exists():
        raise UserError(f"{target} exists; nothing is written over it")
    manifest = read_manifest(folder)
    if found := faults(folder, manifest, manifest.files if arguments.verify == "full" else ()):
        raise CorruptCheckpoint(f"{folder} is damaged, and nothing was exported:{some_of(found)}")
    write = _write_hf if arguments.format == "hf" else _write_plain
    write(folder, manifest, target, arguments)
    print(f"exported step {manifest.step}: {target}")
    return 0


def _write_plain(folder: Path, manifest: Manifest, target: Path, arguments: Namespace) -> None:
    import torch

    from titanlite.checkpoint.hf.export import export, fetch_from, plain_tensors

    outputs = plain_tensors(manifest, getattr(torch, arguments.dtype or _config(folder).checkpoint.export_dtype))
    config = {CONFIG: (folder / CONFIG).read_bytes()}
    export(target, outputs, config, fetch_from(folder, manifest))


def _write_hf(folder: Path, manifest: Manifest, target: Path, arguments: Namespace) -> None:
    import torch

    from titanlite.checkpoint.hf.export import export, fetch_from
    from titanlite.checkpoint.hf.names import Translation, documents
    from titanlite.data.tokenizer import ByteTokenizer, JsonTokenizer
    from titanlite.registry import get_model

    config = _config(folder)
    named, asked = config.model.package, arguments.package
    if named and not asked:
        raise UserError(
            f'{folder}: the model is of the package "{named}", which is imported only where you say so: '
            f"--model.package {named}"
        )
    spec = get_model(config.model.name, asked)
    translation = Translation(spec, spec.configure(config.model.flavor, config.model.overrides))
    saved = {
        name.removeprefix("model."): t.shape for name, t in manifest.tensors.items() if name.startswith("model.")
    }
    if wrong := [name for name in {**translation.shapes, **saved} if translation.shapes.get(name) != saved.get(name)]:
        raise CorruptCheckpoint(f"{folder} does not hold the weights of the model in its {CONFIG}:{some_of(wrong)}")
    assets = arguments.tokenizer or config.model.hf_assets_path
    if assets and not (Path(assets) / "tokenizer.json").is_file():
        if arguments.tokenizer:
            raise UserError(f"--tokenizer {assets}: there is no tokenizer.json")
        print(
            f"titanlite: no tokenizer is exported: {assets} is not here; --tokenizer FOLDER says where",
            file=sys.stderr,
        )
        tokenizer = None
    else:
        tokenizer = JsonTokenizer(Path(assets)) if assets else ByteTokenizer()
    dtype = getattr(torch, arguments.dtype or config.checkpoint.export_dtype)
    beside = documents(translation.config, dtype, tokenizer)
    export(target, translation.hf_tensors(dtype), beside, fetch_from(folder, manifest))


def _import(arguments: Namespace, overrides: list[str]) -> int:
    import torch

    from titanlite.checkpoint.hf.load import HuggingFaceFolder, to_checkpoint
    from titanlite.observe.run_folder import versions
    from titanlite.registry import get_model

    source, target = arguments.folder, arguments.out
    if committed(target):
        raise UserError(f"{target} has checkpoints; nothing is written among them")
    loaded = load(parse_command_line(overrides, os.environ))
    if loaded.faults:
        raise ConfigError(loaded.faults)
    config = loaded.config
    spec = get_model(config.model.name, config.model.package)
    abroad = HuggingFaceFolder(source, spec, spec.configure(config.model.flavor, config.model.overrides))
    dtype = getattr(torch, config.training.dtype)
    environment = {"versions": versions(), "mesh": {}, "imported_from": str(source)}
    folder = to_checkpoint(abroad, target, dtype, to_toml(config), environment)
    print(f"imported {len(abroad.names)} tensors: {folder}")
    print(f'to begin from them: --checkpoint.initial_load_path "{target}"')
    return 0


# ---------------------------------------------------------------- removing


def _rm(arguments: Namespace, overrides: list[str]) -> int:
    folders = [path.resolve() for path in arguments.folders]
    for folder in folders:
        if step_of(folder.name) is None or not (folder / MANIFEST).is_file():
            raise UserError(f"{folder} is no committed checkpoint: those are named step-N, and have a {MANIFEST}")
    for root in {folder.parent for folder in folders}:
        going = {folder for folder in folders if folder.parent == root}
        whole = {step_folder(root, step) for step in committed(root) if is_complete(step_folder(root, step))}
        if whole & going and not whole - going and not arguments.force:
            raise UserError(f"{root} would have no whole checkpoint left; --force removes them all the same")
    for folder in folders:
        if not arguments.dry_run:
            _remove(folder)
        print(f"{'would remove' if arguments.dry_run else 'removed'} {folder}")
    return 0


def _remove(folder: Path) -> None:
    from titanlite.checkpoint.commit import delete, point_latest

    step, root = step_of(folder.name), folder.parent
    assert step is not None
    delete(root, step)
    if (newest := latest_complete(root)) is not None:
        point_latest(root, newest)
    else:
        (root / "latest").unlink(missing_ok=True)


# ---------------------------------------------------------------- words


def _config(folder: Path) -> JobConfig:
    loaded = load(parse_command_line(["--config", str(folder / CONFIG)], {}))
    if loaded.faults:
        raise ConfigError(loaded.faults)
    return loaded.config


def _environment(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / ENVIRONMENT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _mesh(folder: Path) -> str:
    degrees = _environment(folder).get("mesh", {})
    return ", ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1) or "1 rank"


def _print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, on a terminal with damaged checkpoints in red."""
    for line in format_table([[printable(cell) for cell in row] for row in rows], header).splitlines():
        print(f"\033[31m{line}\033[0m" if "damaged: " in line and sys.stdout.isatty() else line)


_COMMANDS: dict[str, Callable[[Namespace, list[str]], int]] = {
    "ls": _ls,
    "verify": _verify,
    "show": _show,
    "diff": _diff,
    "export": _export,
    "import": _import,
    "rm": _rm,
}
