"""`titanlite checkpoint …`: looks at checkpoints of any mesh, and moves weights in and out, without process groups.

No code of a folder runs: it is JSON, TOML, and tensors read as tensors. A package that its config names is imported
only when the command line names it too.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
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
from titanlite.config.load import ConfigError, load, parse_command_line, to_toml
from titanlite.config.schema import JobConfig
from titanlite.data.tokenizer import printable
from titanlite.errors import UserError, format_bytes, nearest, some_of
from titanlite.observe.metrics import duration
from titanlite.tools.arguments import run_verb, split_flags, split_options

USAGE = """  titanlite checkpoint ls [FOLDER] [--full]          steps, size, mesh, age, state (--full: every byte)
  titanlite checkpoint verify FOLDER…                reads every byte; exit code 1 where one is not as written
  titanlite checkpoint show FOLDER                   step, position in the data, tensors, config
  titanlite checkpoint diff A B                      the first tensors that differ; exit code 1 if any does
  titanlite checkpoint export FOLDER OUT [--format hf|safetensors] [--dtype float32|bfloat16|float16]
                              [--tokenizer FOLDER] [--verify full|sizes] [--model.package NAME]
  titanlite checkpoint import HF_FOLDER OUT [--config FILE.toml] [--model.name NAME] [--model.flavor FLAVOR]
                                                     into a checkpoint for checkpoint.initial_load_path
  titanlite checkpoint rm STEP_FOLDER… [--dry-run] [--force]

FOLDER is a checkpoint (…/step-N), a folder of them (then its newest whole one is meant, where one is), or a run's
dump folder; ls and verify look at all that are there.
"""
_SHOWN = 10


def checkpoint(words: list[str]) -> int:
    """Run a verb; the exit code."""
    verbs: dict[str, Callable[[list[str]], int]] = {
        "ls": _ls,
        "verify": _verify,
        "show": _show,
        "diff": _diff,
        "export": _export,
        "import": _import,
        "rm": _rm,
    }
    if not words or {"--help", "-h"} & set(words):
        print(USAGE, end="", file=sys.stdout if words else sys.stderr)
        return 0 if words else 2
    if words[0] not in verbs:
        close = nearest(words[0], verbs)
        hint = f"did you mean {close}?" if close else f"there are: {', '.join(verbs)}"
        print(f"titanlite: there is no `checkpoint {words[0]}`; {hint}", file=sys.stderr)
        return 2
    try:
        return run_verb(lambda: verbs[words[0]](words[1:]))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2


# ---------------------------------------------------------------- which folders are meant


def _all(path: Path) -> list[Path]:
    """The checkpoints that a path stands for, oldest first."""
    if (path / MANIFEST).is_file() or step_of(path.name) is not None:
        return [path]
    for root in (path, path / "checkpoint"):
        if steps := committed(root):
            return [step_folder(root, step) for step in steps]
    raise UserError(f"there is no checkpoint in {path}")


def _one(path: Path) -> Path:
    """The checkpoint, or the newest whole one, that a path stands for."""
    found = _all(path)
    return found[0] if len(found) == 1 else next((f for f in reversed(found) if is_complete(f)), found[-1])


def _paths(verb: str, words: list[str], names: str) -> list[Path]:
    """As many paths as there are names; any number from one where the last name ends in an ellipsis."""
    wanted = names.split()
    many = wanted[-1].endswith("…")
    if any(word.startswith("-") for word in words) or not (words if many else len(words) == len(wanted)):
        raise UserError(f"`checkpoint {verb}` takes {names}, not {' '.join(words) or 'nothing'}")
    return [Path(word) for word in words]


# ---------------------------------------------------------------- looking


def _ls(words: list[str]) -> int:
    words, flags = split_flags(words, ("--full",))
    (path,) = _paths("ls", words or ["outputs"], "FOLDER")
    rows = []
    for folder in _all(path):
        found = _faults(folder, full=bool(flags))
        size, mesh = "?", "?"
        if (folder / MANIFEST).is_file() and not (found and MANIFEST in found[0]):
            manifest = read_manifest(folder)
            size = format_bytes(manifest.size) + (", weights" if manifest.weights_only else "")
            mesh = _mesh(folder)
        verdict = f"damaged: {found[0]}" if found else "sound" if flags else "whole"
        rows.append((folder.name, size, mesh, f"{duration(time.time() - folder.stat().st_mtime)} ago", verdict))
    _table(("step", "size", "mesh", "age", "state"), rows)
    return 0


def _verify(words: list[str]) -> int:
    bad = 0
    for folder in (folder for path in _paths("verify", words, "FOLDER…") for folder in _all(path)):
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


def _show(words: list[str]) -> int:
    folder = _one(_paths("show", words, "FOLDER")[0])
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
    _table(("tensor", "type", "shape", "placement"), rows)
    print("\n" + printable((folder / CONFIG).read_text(encoding="utf-8")), end="")
    return 0


def _diff(words: list[str]) -> int:
    from titanlite.checkpoint.load import load_tensors

    sides = [_one(path) for path in _paths("diff", words, "A B")]
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
        _table(("tensor", "differs"), rows[:_SHOWN])
    total = len(a.tensors.keys() | b.tensors.keys())
    print(f"{len(rows)} of {total} tensors differ, and {others} of the optimizer's single numbers")
    return 1


def _what(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


# ---------------------------------------------------------------- out and in


def _export(words: list[str]) -> int:
    defaults = {"--format": "hf", "--dtype": "", "--tokenizer": "", "--verify": "full", "--model.package": ""}
    words, options = split_options("checkpoint export", words, defaults)
    source, target = _paths("export", words, "FOLDER OUT")
    folder, dtypes = _one(source), ("float32", "bfloat16", "float16")
    _legal("--format", options["--format"], ("hf", "safetensors"))
    _legal("--verify", options["--verify"], ("full", "sizes"))
    _legal("--dtype", options["--dtype"], ("", *dtypes))
    if target.exists():
        raise UserError(f"{target} exists; nothing is written over it")
    manifest = read_manifest(folder)
    if found := faults(folder, manifest, manifest.files if options["--verify"] == "full" else ()):
        raise CorruptCheckpoint(f"{folder} is damaged, and nothing was exported:{some_of(found)}")
    write = _write_hf if options["--format"] == "hf" else _write_plain
    write(folder, manifest, target, options)
    print(f"exported step {manifest.step}: {target}")
    return 0


def _write_plain(folder: Path, manifest: Manifest, target: Path, options: dict[str, str]) -> None:
    import torch

    from titanlite.checkpoint.hf.export import export, fetch_from, plain_outputs

    outputs = plain_outputs(manifest, getattr(torch, options["--dtype"] or _config(folder).checkpoint.export_dtype))
    config = {CONFIG: (folder / CONFIG).read_bytes()}
    export(target, outputs, config, fetch_from(folder, manifest))


def _write_hf(folder: Path, manifest: Manifest, target: Path, options: dict[str, str]) -> None:
    import torch

    from titanlite.checkpoint.hf.export import export, fetch_from
    from titanlite.checkpoint.hf.names import Translation, documents
    from titanlite.data.tokenizer import ByteTokenizer, JsonTokenizer
    from titanlite.registry import get_model

    config = _config(folder)
    named, asked = config.model.package, options["--model.package"]
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
    assets = options["--tokenizer"] or config.model.hf_assets_path
    if assets and not (Path(assets) / "tokenizer.json").is_file():
        if options["--tokenizer"]:
            raise UserError(f"--tokenizer {assets}: there is no tokenizer.json")
        print(
            f"titanlite: no tokenizer is exported: {assets} is not here; --tokenizer FOLDER says where",
            file=sys.stderr,
        )
        tokenizer = None
    else:
        tokenizer = JsonTokenizer(Path(assets)) if assets else ByteTokenizer()
    dtype = getattr(torch, options["--dtype"] or config.checkpoint.export_dtype)
    beside = documents(translation.config, dtype, tokenizer)
    export(target, translation.outputs(dtype), beside, fetch_from(folder, manifest))


def _import(words: list[str]) -> int:
    import torch

    from titanlite.checkpoint.hf.export import HuggingFaceFolder, to_checkpoint
    from titanlite.observe.run_folder import versions
    from titanlite.registry import get_model

    first = next((at for at, word in enumerate(words) if word.startswith("-")), len(words))
    source, target = _paths("import", words[:first], "HF_FOLDER OUT")
    if committed(target):
        raise UserError(f"{target} has checkpoints; nothing is written among them")
    loaded = load(parse_command_line(words[first:], os.environ))
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


def _rm(words: list[str]) -> int:
    words, flags = split_flags(words, ("--dry-run", "--force"))
    folders = [path.resolve() for path in _paths("rm", words, "STEP_FOLDER…")]
    for folder in folders:
        if step_of(folder.name) is None or not (folder / MANIFEST).is_file():
            raise UserError(f"{folder} is no committed checkpoint: those are named step-N, and have a {MANIFEST}")
    for root in {folder.parent for folder in folders}:
        going = {folder for folder in folders if folder.parent == root}
        whole = {step_folder(root, step) for step in committed(root) if is_complete(step_folder(root, step))}
        if whole & going and not whole - going and "--force" not in flags:
            raise UserError(f"{root} would have no whole checkpoint left; --force removes them all the same")
    for folder in folders:
        if "--dry-run" not in flags:
            _remove(folder)
        print(f"{'would remove' if '--dry-run' in flags else 'removed'} {folder}")
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


def _legal(option: str, value: str, legal: Iterable[str]) -> None:
    if value not in legal:
        raise UserError(f"{option} {value}: there are {', '.join(filter(None, legal))}")


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


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns; in color on a terminal, and plain where a program reads."""
    rows = [[printable(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(*head, box=None, pad_edge=False, header_style="bold")
        for row in rows:
            table.add_row(*(Text(cell, style="red" if cell.startswith("damaged") else "") for cell in row))
        Console().print(table)
        return
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    for row in [head, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
