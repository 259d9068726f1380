"""Committed checkpoint folders: their content, whether they are complete, and which may be deleted.

Imports no torch and needs no process group, so that the launcher and a laptop can read what any
mesh wrote. Nothing is unpickled: the manifest, which is JSON with a checksum, tells where tensors
are.
"""

import json
import re
import socket
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from titanlite.checkpoint.stored_tensors import StoredTensor
from titanlite.errors import UserError
from titanlite.runtime.bucket import Place
from titanlite.runtime.store import crc32

LATEST = "latest"
MANIFEST = "manifest.json"
STATE = "state.json"
CONFIG = "config.toml"
ENVIRONMENT = "environment.json"
DCP_METADATA = ".metadata"
"""The file that torch's DCP writes last, found in TorchTitan's checkpoints."""
FORMAT = 2
_HEAD = b'{"crc32":%d,"manifest":'


MISSING = (FileNotFoundError, NotADirectoryError)


class CorruptCheckpoint(UserError):
    """A folder that differs from its committed state."""


class Unreadable(UserError):
    """A file that cannot be read at the moment, but need not be damaged."""

    def __init__(self, path: Place, error: OSError) -> None:
        where = f"{error.filename or path} cannot be read on {socket.gethostname()}"
        super().__init__(f"{where}: {error.strerror or error}; start again when it can")


@dataclass(frozen=True)
class File:
    """Size and checksum of a written file."""

    size: int
    crc32: int


@dataclass(frozen=True)
class Base:
    """The frozen weights that adapters were trained with, stored elsewhere."""

    folder: str
    fingerprint: str
    """Fingerprint of its files."""


@dataclass(frozen=True)
class Manifest:
    """Everything that a checkpoint contains."""

    step: int
    weights_only: bool
    """Without optimizer state, a run can start from the weights, but not resume."""
    files: dict[str, File]
    tensors: dict[str, StoredTensor]
    format: int = FORMAT
    attempt: str = ""
    """The folder with the files, next to the manifest, of a checkpoint in a bucket."""
    base: Base | None = None
    """The weights that the adapters belong to, if the checkpoint has only adapters."""
    run: str = ""
    """The run that created it, in a bucket."""

    def render(self) -> bytes:
        """Return the content of the manifest's file. Only exactly this form is accepted, so that
        any changed byte counts as damage.
        """
        fields = {key: value for key, value in vars(self).items() if value not in ("", None)}
        body = json.dumps(fields, default=vars, separators=(",", ":"), sort_keys=True).encode()
        return b"%s%s}\n" % (_HEAD % zlib.crc32(body), body)

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files.values())


_MANIFEST = TypeAdapter(Manifest)


@dataclass(frozen=True)
class Position:
    """The progress of a run. Samples are counted, since the global batch may change."""

    step: int = 0
    tokens: int = 0
    consumed: int = 0
    """Samples trained on so far."""
    epoch: int | None = 0  # None: each source of a mixture or reader of a stream has its own
    seed: int = 0
    fingerprint: str = ""
    """Fingerprint of the data."""


def step_folder(root: Place, step: int) -> Place:
    return root / f"step-{step}"


def export_folder(root: Place, step: int) -> Place:
    """Return where a run writes its last weights in Hugging Face's format."""
    return root / f"hf-step-{step}"


def step_of(name: str) -> int | None:
    """Return the step in a folder's name; None for names that titanlite does not write."""
    match = re.fullmatch(r"step-(0|[1-9][0-9]*)", name)
    return int(match[1]) if match else None


def point_latest(root: Place, step: int | None) -> None:
    """Write a step's name into the file `latest`; without a step, remove it."""
    if step is None:
        (root / LATEST).remove()
    else:
        (root / LATEST).put(f"step-{step}\n".encode())


def named_latest(root: Place) -> int | None:
    """Return the step that `latest` names; None without such a file."""
    if not (root / LATEST).exists():
        return None
    return step_of((root / LATEST).read_bytes().decode(errors="replace").strip())


def committed(root: Place) -> list[int]:
    """Return the steps with folders here, in order.

    `read_manifest` and `faults` check the contents.
    """
    steps = [step_of(name) for name, path in root.entries().items() if path.is_dir()]
    return sorted(step for step in steps if step is not None)


FOREIGN = (
    "a checkpoint in torch's DCP format, as TorchTitan writes. To start from it: "
    "--checkpoint.initial_load_path {}; to continue with its optimizer and step, add "
    "--checkpoint.no_initial_load_model_only (docs/from-torchtitan.md)"
)


def is_foreign(path: Place) -> bool:
    """Return whether a place is a checkpoint of torch's own format, without any document of
    titanlite's: its folder, or a file that torch made of it.
    """
    if not (path / DCP_METADATA).exists():
        return path.is_file()
    return not any((path / name).exists() for name in (MANIFEST, STATE, CONFIG))


def is_torn(path: Place) -> bool:
    """Return whether torch's DCP has written here and not ended: its .metadata comes last."""
    names = path.entries()
    has_shards = any(name.endswith(".distcp") for name in names)
    return has_shards and not {DCP_METADATA, MANIFEST} & names.keys()


def read_manifest(folder: Place, outline: bool = False) -> Manifest:
    """Read the manifest of a committed folder; CorruptCheckpoint if any byte of it is not as
    written.

    An outline has no tensors, which are most of the bytes: they are checksummed, which does not
    block other threads, but not parsed.
    """
    try:
        raw = (folder / MANIFEST).read_bytes()
    except FileNotFoundError:
        if is_foreign(folder):
            raise CorruptCheckpoint(f"{folder}: {FOREIGN.format(folder)}") from None
        if is_torn(folder):
            raise CorruptCheckpoint(
                f"{folder} is not a complete checkpoint: torch's DCP did not finish writing it "
                f"(there is no {DCP_METADATA}); name an earlier step"
            ) from None
        why = "there is no such folder"
        if folder.exists():
            why = f"it has no {MANIFEST}, nor torch's {DCP_METADATA}"
        if (folder / "config.json").exists():
            why += "; --model.flavor hf starts from a Hugging Face folder"
        raise CorruptCheckpoint(f"{folder} is not a complete checkpoint: {why}") from None
    except OSError as error:
        raise Unreadable(folder / MANIFEST, error) from None
    try:
        begin = raw.index(b":{") + 1
        if raw != _HEAD % zlib.crc32(memoryview(raw)[begin:-2]) + raw[begin:-2] + b"}\n":
            raise ValueError
        if outline:
            after = raw.rindex(b',"weights_only":')
            raw = raw[: raw.index(b',"tensors":')] + b',"tensors":{}' + raw[after:]
        body = json.loads(raw)["manifest"]
        if body["format"] > FORMAT:
            raise UserError(
                f"{folder / MANIFEST}: written by another version of titanlite, in a newer format"
            )
        return _MANIFEST.validate_python(body)
    except (ValueError, KeyError, TypeError):
        raise CorruptCheckpoint(f"{folder / MANIFEST}: damaged since it was written") from None


def faults(
    folder: Place,
    manifest: Manifest,
    contents: Iterable[str] = (),
    resumable: bool = False,
    select: Callable[..., Any] = iter,
) -> list[str]:
    """Return the faults of a committed folder, by file.

    These are extra files and, among its own files that `select` yields, missing ones, wrong sizes,
    and wrong checksums of files in `contents`. If `resumable`, weights alone are a fault too.
    """
    if step_of(folder.name) not in (None, manifest.step):
        return [f"{folder}: a copy of step {manifest.step} under another name"]
    folder = folder / manifest.attempt
    problems = list[str]()
    present = folder.entries()
    for name in sorted(present.keys() - manifest.files.keys() - {MANIFEST}):
        problems.append(f"{folder / name}: not part of the checkpoint")
    # By size, so that shares of every Nth file have about the same number of bytes.
    files = sorted(manifest.files.items(), key=lambda item: (item[1].size, item[0]))
    for name, file in select(files):
        if name not in present:
            problems.append(f"{folder / name}: missing")
            continue
        size = present[name].stat().st_size
        if size != file.size:
            problems.append(f"{folder / name}: {size:,} bytes, {file.size:,} were written")
        elif name in contents and crc32(present[name].blocks()) != file.crc32:
            problems.append(f"{folder / name}: checksum mismatch")
    if resumable and manifest.weights_only:
        problems.append(f"{folder}: contains weights only and cannot be resumed")
    return sorted(problems)


def read_state(folder: Place) -> dict[str, Any]:
    """Read state.json: the run's position, the positions of streams, and the optimizer's
    scalars.
    """
    return json.loads(read_document(folder, STATE))


def read_document(folder: Place, name: str) -> bytes:
    """Read a file next to the tensors."""
    return (folder / read_manifest(folder, outline=True).attempt / name).read_bytes()


def is_complete(folder: Place, resumable: bool = False) -> bool:
    """Whether a folder has a valid manifest, all its files at their recorded sizes and, if
    `resumable`, more than weights.
    """
    try:
        return not faults(folder, read_manifest(folder, outline=True), resumable=resumable)
    except (CorruptCheckpoint, *MISSING):
        return False
    except OSError as error:
        raise Unreadable(folder, error) from None


def latest_complete(root: Place) -> int | None:
    """Return the newest complete step."""
    for step in reversed(committed(root)):
        if is_complete(step_folder(root, step)):
            return step
    return None


def steps_to_delete(root: Place, keep_latest_k: int, keep_every: int, known: set[int]) -> list[int]:
    """Return the steps of complete checkpoints that need not be kept; keep_latest_k = 0 keeps all.

    Damaged or weights-only checkpoints are neither counted nor deleted, since they may be all that
    is left. Complete ones are added to `known`, whose files, as many as ranks, are not checked
    again.
    """
    present = {*committed(root)}
    for step in present - known:
        if is_complete(step_folder(root, step), resumable=True):
            known.add(step)
    if not keep_latest_k:
        return []
    old = sorted(present & known)[:-keep_latest_k]
    return [step for step in old if not keep_every or step % keep_every]
