"""`titanlite checkpoint …`: inspect, export and import checkpoints of any mesh, without process
groups.

No code from a folder ever runs: it has JSON, TOML and tensors. A package that its config names is
imported only if the command line names it too."""

import json
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import chain

from titanlite.checkpoint.manifest import (
    CONFIG,
    ENVIRONMENT,
    MANIFEST,
    CorruptCheckpoint,
    Manifest,
    faults,
    read_document,
    read_manifest,
    read_state,
)
from titanlite.config.options import Options, declare_commands
from titanlite.data.tokenizer import printable
from titanlite.errors import UserError, format_bytes, format_table, some_of
from titanlite.runtime.bucket import Place, local_folder, place
from titanlite.runtime.store import LocalPath
from titanlite.tools.checkpoint_cp import copy
from titanlite.tools.checkpoint_hf import export, import_folder
from titanlite.tools.load import (
    DOCUMENTS,
    brought,
    find_checkpoint,
    find_checkpoints,
    track_files,
    whole_manifest,
)

_SHOWN_DIFFERENCES = 10
_COUNTS = ("step", "tokens", "consumed")  # the fields of a position that are counts
_ABOUT = (
    "a checkpoint (…/step-N), or {} of a folder of them or of a run's dump folder; "
    "also a URL (s3://, gs://, az://)"
)
_PLACE = (_ABOUT.format("the latest complete one"), place)
_ALL = _ABOUT.format("all")
_DEFAULT = "; default: outputs"


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the sub-commands."""
    commands = declare_commands(parser, _COMMANDS)
    commands["import"].set_defaults(takes_overrides=True)


def run(arguments: Namespace, overrides: list[str]) -> int:
    """Run a sub-command."""
    return arguments.run(arguments, *overrides)


def _ls(arguments: Namespace) -> int:
    rows = []
    for folder in find_checkpoints(arguments.folder):
        manifest, problems = _check(folder, arguments.full)
        size = mesh = age = "?"
        if manifest:
            weights = ", weights" if manifest.weights_only else ""
            size = format_bytes(manifest.size) + weights
            mesh, _ = _environment(folder)
        state = "verified" if arguments.full else "complete"
        if problems:
            state = f"damaged: {problems[0]}"
        state += _describe_base(manifest)
        if (folder / MANIFEST).exists():
            age = _age(time.time() - (folder / MANIFEST).stat().st_mtime)
        rows.append((folder.name, size, mesh, age, state))
    _print_table(("step", "size", "mesh", "age", "state"), rows)
    return 0


def _age(seconds: float) -> str:
    """Return an age in its largest unit, such as 18 min ago."""
    for unit, size in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{max(0, seconds):.0f} s ago"


def _verify(arguments: Namespace) -> int:
    damaged = False
    for path in arguments.folder:
        for folder in find_checkpoints(path):
            manifest, problems = _check(folder, full=True)
            state = f"verified{_describe_base(manifest)}"
            if problems:
                damaged = True
                state = f"damaged{some_of(problems)}"
            print(f"{folder}: {state}")
    return int(damaged)


def _describe_base(manifest: Manifest | None) -> str:
    """Return the place of the weights that adapters belong to, and whether they exist."""
    if not manifest or not manifest.base:
        return ""
    folder = place(manifest.base.folder)
    is_there = (folder / MANIFEST).exists() or (folder / "config.json").exists()
    return f"; its base, {folder}, {'exists' if is_there else 'is MISSING'}"


def _check(folder: Place, full: bool) -> tuple[Manifest | None, list[str]]:
    """Return the manifest, if it can be read, and the faults of the folder."""
    try:
        manifest = read_manifest(folder)
        if full:
            return manifest, faults(folder, manifest, manifest.files, select=track_files)
        return manifest, faults(folder, manifest, DOCUMENTS)
    except (UserError, OSError) as error:
        return None, [str(error)]


def _show(arguments: Namespace) -> int:
    folder = find_checkpoint(arguments.folder)
    manifest = whole_manifest(folder)
    mesh, versions = _environment(folder)
    position = list[str]()
    for name, value in read_state(folder)["position"].items():
        if name in _COUNTS:
            position.append(f"{name} {value:,}")
        else:
            position.append(f"{name} {value}")
    model = {}
    for name, tensor in manifest.tensors.items():
        if name.startswith("model."):
            model[name] = tensor
    optimizer = manifest.tensors.keys() - model.keys()
    kinds = ", ".join(sorted({name.rpartition(".")[2] for name in optimizer}))
    print(
        f"{folder}: step {manifest.step}, {format_bytes(manifest.size)} "
        f"in {len(manifest.files)} files"
    )
    rows = [
        ("data", ", ".join(position)),
        ("mesh", mesh),
        ("versions", versions),
        ("optimizer", f"{kinds} in {len(optimizer)} tensors" if optimizer else "weights only"),
    ]
    if manifest.base:
        rows.append(("base", f"{manifest.base.folder}, fingerprint {manifest.base.fingerprint}"))
    _print_table((), rows)
    print()
    rows = []
    for name, tensor in model.items():
        rows.append((name, tensor.dtype, str([*tensor.shape]), tensor.placement))
    _print_table(("tensor", "type", "shape", "placement"), rows)
    print("\n" + printable(read_document(folder, CONFIG).decode()), end="")
    return 0


def _diff(arguments: Namespace) -> int:
    sides = [find_checkpoint(path) for path in (arguments.a, arguments.b)]
    manifests = [*map(read_manifest, sides)]
    names = sorted({*chain(*(manifest.tensors for manifest in manifests))})
    with ExitStack() as stack:
        for side in sides:
            stack.enter_context(brought(side))
        differences = [(name, _difference(name, sides, manifests)) for name in names]
    a, b = (read_state(side)["numbers"] for side in sides)
    rows = [row for row in differences if row[1]]
    numbers = sum(a.get(key) != b.get(key) for key in a.keys() | b.keys())
    if not rows and not numbers:
        print(f"the same {len(names)} tensors")
        return 0
    if rows:
        _print_table(("tensor", "differs"), rows[:_SHOWN_DIFFERENCES])
    print(f"{len(rows)} of {len(names)} tensors differ, and {numbers} of the optimizer's scalars")
    return 1


def _difference(name: str, sides: Sequence[Place], manifests: Sequence[Manifest]) -> str:
    """Describe how a tensor of two checkpoints differs, or return an empty string."""
    from titanlite.checkpoint.load import load_tensors

    kinds = []
    for manifest, other in zip(manifests, reversed(sides), strict=True):
        if name not in manifest.tensors:
            return f"only in {other}"
        kinds.append(f"{manifest.tensors[name].dtype} {[*manifest.tensors[name].shape]}")
    if kinds[0] != kinds[1]:
        return ", ".join(kinds)
    a, b = (
        load_tensors(side, [name], manifest)[name]
        for side, manifest in zip(sides, manifests, strict=True)
    )
    if a.equal(b):
        return ""
    distance = (a.double() - b.double()).abs()
    count = f"{int((distance != 0).sum()):,} of {distance.numel():,} numbers"
    return f"{count}, by {distance.max():.3g} at most"


def _environment(folder: Place) -> tuple[str, str]:
    """Return the mesh and the versions that wrote a checkpoint, as far as they can be read."""
    try:
        environment = json.loads(read_document(folder, ENVIRONMENT))
    except (OSError, ValueError, CorruptCheckpoint):
        environment = {}
    mesh = []
    for name, degree in environment.get("mesh", {}).items():
        if degree > 1:
            mesh.append(f"{name} {degree}")
    versions = [f"{name} {version}" for name, version in environment.get("versions", {}).items()]
    return ", ".join(mesh) or "1 rank", ", ".join(versions)


def _print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, on a terminal with damaged checkpoints in red."""
    table = format_table([[*map(printable, row)] for row in rows], header)
    for line in table.splitlines():
        if "damaged: " in line and sys.stdout.isatty():
            line = f"\033[31m{line}\033[0m"
        print(line)


_COMMANDS: dict[str, tuple[Callable[..., int], str, str, Options]] = {
    "ls": (
        _ls,
        "list steps, size, mesh, age and state",
        "ls outputs --full",
        {
            "[FOLDER]": (_ALL + _DEFAULT, place, LocalPath("outputs")),
            "--full": "read every byte",
        },
    ),
    "verify": (
        _verify,
        "read every byte; exit code 1 if a checksum differs",
        "verify outputs",
        {"[FOLDER …]": (_ALL + _DEFAULT, place, [LocalPath("outputs")])},
    ),
    "show": (
        _show,
        "print the step, the position in the data, tensors and config",
        "show outputs",
        {"[FOLDER]": (_PLACE[0] + _DEFAULT, place, LocalPath("outputs"))},
    ),
    "diff": (
        _diff,
        "print the first tensors that differ; exit code 1 if any does",
        "diff outputs/a outputs/b",
        {"A": _PLACE, "B": _PLACE},
    ),
    "export": (
        export,
        "write the weights in Hugging Face's format, or as plain safetensors",
        "export outputs hf",
        {
            "FOLDER": _PLACE,
            "OUT": ("a folder that does not exist", local_folder),
            "--format hf|safetensors|peft|torchtitan|dcp": (
                "hf: for transformers, with adapters added (default); safetensors: the tensors as "
                "the checkpoint names them; peft: the adapters alone, for peft; torchtitan: a "
                "checkpoint that TorchTitan 0.2.2 resumes; dcp: the same tensors alone",
                str,
                "hf",
            ),
            "--dtype float32|bfloat16|float16": "default: the config's checkpoint.export_dtype",
            "--tokenizer FOLDER": ("default: the run's own", str, ""),
            "--verify full|sizes": ("what to check first (default: full)", str, "full"),
            "--base FOLDER": ("where the base of adapters is, if it was moved", str, ""),
            "--model.package NAME": (
                "the package the model is in; needed if the checkpoint's config names one",
                str,
                "",
            ),
        },
    ),
    "import": (
        import_folder,
        "read a Hugging Face folder into a checkpoint for checkpoint.initial_load_path",
        "import Llama-3.2-1B start\n\nThe model is that of config.json, "
        "unless config keys name it: [--config FILE.toml …] [--model.KEY VALUE …]",
        {
            "HF_FOLDER": ("config.json and *.safetensors", local_folder),
            "OUT": ("where step-0 is written", local_folder),
        },
    ),
    "cp": (
        copy,
        "copy checkpoints between folders and object stores, verified",
        "cp outputs s3://bucket/run",
        {
            "FROM": (f"{_PLACE[0]}; or a folder of Hugging Face or TorchTitan", place),
            "TO": (
                "a run's dump folder, a folder of checkpoints, or the URL in which step-N will be; "
                "the copy of a Hugging Face folder",
                place,
            ),
            "--all": "every complete checkpoint of FROM, except those that TO has already",
        },
    ),
}
