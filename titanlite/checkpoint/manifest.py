"""A committed checkpoint folder as it lies on disk: what it holds, and whether it is whole.

No torch and no process group: the launcher and a laptop read with it what any mesh wrote. Nothing here, or in what
builds on it, unpickles: the tensors' places come from the manifest, which is JSON and guards itself.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from titanlite.errors import UserError

MANIFEST, STATE, CONFIG, ENVIRONMENT = "manifest.json", "state.json", "config.toml", "environment.json"
FORMAT = 1
SEEN_BY_ALL = ".seen-by-all-"
"""Begins the name of a file by which the ranks learn whether they share the folder."""
_BLOCK = 1 << 22


class CorruptCheckpoint(UserError):
    """A folder that is not what was committed."""


@dataclass(frozen=True)
class File:
    """What was written to a file."""

    size: int
    crc32: int


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, and the bytes that hold it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Tensor:
    """A whole tensor, as it was before it was sharded."""

    shape: tuple[int, ...]
    dtype: str
    placement: str
    """How it lay on the mesh that saved it; for people."""
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Manifest:
    """All that a checkpoint holds."""

    step: int
    weights_only: bool
    """It has no optimizer state: a run can begin from it, and not go on."""
    files: dict[str, File]
    tensors: dict[str, Tensor]

    def render(self) -> bytes:
        """The manifest's file, in the one form that is accepted: any other byte in it is damage."""
        body = _canonical({"format": FORMAT, **asdict(self)})
        return b'{"crc32":%d,"manifest":%s}\n' % (zlib.crc32(body), body)

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files.values())


def step_folder(root: Path, step: int) -> Path:
    return root / f"step-{step}"


def export_folder(root: Path, step: int) -> Path:
    """Where a run leaves its last weights in Hugging Face's format."""
    return root / f"hf-step-{step}"


def step_of(name: str) -> int | None:
    """The step of a folder's name; None for any name that is not exactly one that we write."""
    found = re.fullmatch(r"step-(0|[1-9][0-9]*)", name)
    return int(found[1]) if found else None


def leftovers(root: Path) -> list[Path]:
    """What a killed save, deletion or start left behind."""
    ours = re.compile(rf"\.step-\d+\.(staging|deleted)|{re.escape(SEEN_BY_ALL)}[0-9a-f]{{32}}")
    return sorted(path for path in root.glob(".s*") if ours.fullmatch(path.name))


def committed(root: Path) -> list[int]:
    """Steps that were published here, in order; `read_manifest` and `faults` tell whether they are sound."""
    steps = [step_of(path.parent.name) for path in root.glob(f"step-*/{MANIFEST}")]
    return sorted(step for step in steps if step is not None)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a committed folder; CorruptCheckpoint where it is not, byte for byte, what was written."""
    try:
        raw = (folder / MANIFEST).read_bytes()
    except FileNotFoundError:
        raise CorruptCheckpoint(f"{folder} has no {MANIFEST}, so it is no committed checkpoint") from None
    try:
        whole = json.loads(raw)
        body = whole["manifest"]
        if zlib.crc32(_canonical(body)) != whole["crc32"]:
            raise ValueError
        if body.pop("format") != FORMAT:
            raise UserError(f"{folder / MANIFEST}: written by another version of titanlite, in a newer format")
        files = {name: File(**file) for name, file in body.pop("files").items()}
        tensors = {name: _tensor(entry) for name, entry in body.pop("tensors").items()}
        manifest = Manifest(files=files, tensors=tensors, **body)
        if manifest.render() != raw:
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CorruptCheckpoint(f"{folder / MANIFEST}: not as it was written") from None
    return manifest


def _canonical(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()


def _tensor(entry: dict[str, Any]) -> Tensor:
    chunks = (
        Chunk(offsets=tuple(chunk.pop("offsets")), sizes=tuple(chunk.pop("sizes")), **chunk)
        for chunk in entry.pop("chunks")
    )
    return Tensor(shape=tuple(entry.pop("shape")), chunks=tuple(chunks), **entry)


def faults(folder: Path, manifest: Manifest, contents: Iterable[str] = ()) -> list[str]:
    """What is wrong with a committed folder, each fault naming the file: missing and extra files and wrong sizes,
    and for the files in `contents` every byte."""
    found, listed = [], {path.name: path for path in folder.iterdir()}
    for name in sorted(listed.keys() - manifest.files.keys() - {MANIFEST}):
        found.append(f"{folder / name}: not part of the checkpoint")
    for name, file in sorted(manifest.files.items()):
        if name not in listed:
            found.append(f"{folder / name}: missing")
        elif (size := listed[name].stat().st_size) != file.size:
            found.append(f"{folder / name}: {size:,} bytes, {file.size:,} were written")
        elif name in contents and crc32_of(listed[name]) != file.crc32:
            found.append(f"{folder / name}: its bytes are not those that were written")
    return found


def crc32_of(path: Path) -> int:
    """The checksum of a file, read in pieces."""
    total = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            total = zlib.crc32(block, total)
    return total


def split_files_by_size(manifest: Manifest, ranks: int) -> list[list[str]]:
    """The files split among ranks, about as many bytes for each."""
    parts: list[tuple[int, list[str]]] = [(0, []) for _ in range(ranks)]
    for name, file in sorted(manifest.files.items(), key=lambda item: -item[1].size):
        least = min(range(ranks), key=lambda rank: parts[rank][0])
        parts[least] = (parts[least][0] + file.size, [*parts[least][1], name])
    return [names for _, names in parts]


def read_state(folder: Path) -> dict[str, Any]:
    """The checkpoint's JSON: the trainer's and the data's position, and the optimizer's single numbers."""
    return json.loads((folder / STATE).read_text(encoding="utf-8"))


def is_complete(folder: Path) -> bool:
    """Whether a folder's manifest is whole and its files have their sizes; their bytes are not read."""
    try:
        return not faults(folder, read_manifest(folder))
    except CorruptCheckpoint:
        return False


def latest_complete(root: Path) -> int | None:
    """The newest step that is whole."""
    return next((step for step in reversed(committed(root)) if is_complete(step_folder(root, step))), None)
