"""Weights out of a run or a checkpoint into a folder that others read, and from such a folder in.

Out: files are dealt among the ranks. All ranks gather one tensor (with those it is joined with) at a time, the next
of each rank's file in turn, then all write theirs at once; a rank holds two of the largest tensors, never the model.
The folder is staged and renamed as a checkpoint is. The bytes are the same from any mesh.
In: every rank reads the boxes that its shards need, after all names, shapes and config.json were compared.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from titanlite.checkpoint.commit import commit, fsync_folder, rank_in, run_on_all_ranks, to_json, write
from titanlite.checkpoint.hf.files import INDEX, Reader, Writer, index, split
from titanlite.checkpoint.hf.names import Output, Translation, config_faults, documents
from titanlite.checkpoint.load import check_exclude_patterns, dtype_of, excluded, load_tensors
from titanlite.checkpoint.manifest import CONFIG, ENVIRONMENT, STATE, Manifest, step_folder
from titanlite.checkpoint.state import Position
from titanlite.data.tokenizer import Tokenizer
from titanlite.errors import UserError, first_line, some_of
from titanlite.parallel.dtensor import box_of, local_part
from titanlite.registry import ModelSpec

FILE_BYTES = 4 << 30
"""A file's size; a tensor that is larger has one for itself."""

Fetch = Callable[[str], torch.Tensor]
"""A whole tensor by its plain name; on a mesh all ranks ask for the same at the same time."""


def export(
    target: Path,
    outputs: Sequence[Output],
    beside: Mapping[str, bytes],
    fetch: Fetch,
    group: dist.ProcessGroup | None = None,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write a folder of tensors and what lies beside them; it has its name when it is whole, on all ranks.

    A folder that is there already is replaced.
    """
    what, rank, staging = f"the export to {target}", rank_in(group), target.parent / f".{target.name}.staging"
    files = split(outputs, file_bytes)

    def begin() -> None:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)

    def publish() -> None:
        for name, content in {**beside, INDEX: index(files)}.items():
            write(staging / name, content)
        fsync_folder(staging)
        replaced = target.parent / f".{target.name}.replaced"
        shutil.rmtree(replaced, ignore_errors=True)
        if target.exists():
            target.rename(replaced)
        staging.rename(target)
        fsync_folder(target.parent)
        shutil.rmtree(replaced, ignore_errors=True)

    try:
        run_on_all_ranks(group, what, lambda: begin() if rank == 0 else None)
        _write_all(staging, files, fetch, group, what)
        run_on_all_ranks(group, what, lambda: publish() if rank == 0 else None)
    except BaseException:
        if rank == 0:
            shutil.rmtree(staging, ignore_errors=True)
        raise


def _write_all(
    staging: Path, files: dict[str, list[Output]], fetch: Fetch, group: dist.ProcessGroup | None, what: str
) -> None:
    """Round by round, a tensor for each rank."""
    rank, world = rank_in(group), dist.get_world_size(group) if group else 1
    shares = [dict(list(files.items())[owner::world]) for owner in range(world)]
    queues = [[output for file in share.values() for output in file] for share in shares]
    writer = Writer(staging, shares[rank])
    for number in range(max(map(len, queues))):
        mine: list[torch.Tensor] = []
        for owner, queue in enumerate(queues):
            if number < len(queue):
                parts = [fetch(name) for name in queue[number].parts]
                if owner == rank:
                    mine = [queue[number].made_of(parts).cpu()]
                del parts
        # Ranks meet here with the checkpoints' timeout, and never wait for a disk in a group of the training.
        run_on_all_ranks(group, what, lambda mine=mine: [writer.add(tensor) for tensor in mine])


def export_live(
    target: Path,
    translation: Translation,
    live: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    tokenizer: Tokenizer | None,
    group: dist.ProcessGroup,
    file_bytes: int = FILE_BYTES,
) -> None:
    """A Hugging Face folder out of a run's own tensors, `model.NAME` on any mesh."""

    @torch.no_grad()
    def fetch(name: str) -> torch.Tensor:
        tensor = live[f"model.{name}"].detach().to(dtype)
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    beside = documents(translation.config, dtype, tokenizer)
    export(target, translation.outputs(dtype), beside, fetch, group, file_bytes)


def fetch_from(folder: Path, manifest: Manifest) -> Fetch:
    """Tensors of a checkpoint, one at a time, in this process alone."""

    def fetch(name: str) -> torch.Tensor:
        return load_tensors(folder, [f"model.{name}"], manifest)[f"model.{name}"]

    return fetch


def plain_outputs(manifest: Manifest, dtype: torch.dtype) -> list[Output]:
    """A checkpoint's weights by their own names; what is no floating number keeps its type."""
    found = []
    for name, entry in manifest.tensors.items():
        if name.startswith("model."):
            own, plain = dtype_of(entry.dtype), name.removeprefix("model.")
            found.append(Output(plain, (plain,), entry.shape, dtype if own.is_floating_point else own))
    return found


class HuggingFaceFolder:
    """A Hugging Face folder that fits a model, opened; an error names all that does not fit."""

    def __init__(self, folder: Path, spec: ModelSpec, flavor: Any, exclude: Sequence[str] = ()) -> None:
        self.folder = folder
        self._reader, self.translation = Reader(folder), Translation(spec, flavor)
        table = self.translation.table
        native = {f"model.{name}" for name in table}
        check_exclude_patterns(list(exclude), native)
        self.names = [name for name in table if not excluded(f"model.{name}", exclude)]
        self._config = _read_config(folder)
        faults = [*self._reader.faults, *config_faults(self._config, self.translation), *self._differences()]
        if faults:
            raise UserError(
                f"{folder} does not fit {spec.name} as it is configured; nothing was read:{some_of(faults)}"
            )

    def _differences(self) -> Iterator[str]:
        there, hf = self._reader.shapes, self.translation.hf
        wanted = {output.name: output for output in self.translation.outputs(torch.float32)}
        # The model without its head, as some folders hold it, lacks the first component of every name.
        bare = {name: name.partition(".")[2] for name in wanted}
        is_bare = not wanted.keys() & there and set(bare.values()) & there.keys()
        self._name_of = bare if is_bare else {name: name for name in wanted}
        needed = {self.translation.table[name].hf_name(name) for name in self.names}
        for name, output in wanted.items():
            found = there.get(self._name_of[name])
            if found is None and name in needed:
                yield f"{self._name_of[name]}: missing"
            elif found is not None and name in needed and found != output.shape:
                yield f"{self._name_of[name]}: of shape {list(found)}, {list(output.shape)} here"
        tied = self._config.get("tie_word_embeddings") and any(rule.tied for rule in self.translation.table.values())
        for name in sorted(there.keys() - set(self._name_of.values())):
            if not (excluded(name, hf.ignored_tensors) or (tied and name == "lm_head.weight")):
                yield f"{name}: unexpected"

    def read(self, name: str, like: torch.Tensor | None = None) -> torch.Tensor:
        """A tensor by its plain name: the box of it that a live one holds on this rank, or all of it."""
        box = None if like is None else box_of(like)
        return self.translation.read(name, box, lambda there, part: self._reader.read(self._name_of[there], part))

    @torch.no_grad()
    def fill(self, live: Mapping[str, torch.Tensor]) -> None:
        """Copy this rank's part of every tensor into `model.NAME`."""
        for name in self.names:
            tensor = live[f"model.{name}"]
            local = local_part(tensor)
            if local.numel():
                local.copy_(self.read(name, tensor))


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if not isinstance(found, dict):
            raise ValueError("it is no object")
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {first_line(error)}") from None
    return found


class _Lazily(Mapping[str, torch.Tensor]):
    """Tensors that exist when they are looked at."""

    def __init__(self, names: Iterable[str], read: Callable[[str], torch.Tensor]) -> None:
        self._names, self._read = list(names), read

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def to_checkpoint(
    abroad: HuggingFaceFolder, root: Path, dtype: torch.dtype, config: str, environment: dict[str, Any]
) -> Path:
    """Write a checkpoint of step 0 that has the folder's weights and nothing else, a tensor at a time, alone."""
    shapes = abroad.translation.shapes
    places = {f"model.{name}": torch.empty(shapes[name], dtype=dtype, device="meta") for name in abroad.names}
    weights = _Lazily(places, lambda name: abroad.read(name.removeprefix("model.")).to(dtype).contiguous())
    position = asdict(Position(step=0, tokens=0, consumed=0, epoch=0, seed=0, fingerprint=""))
    texts = {
        STATE: to_json({"position": position, "numbers": {}, "streams": {}}),
        CONFIG: config.encode(),
        ENVIRONMENT: to_json(environment),
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        commit(root, 0, places, weights, None, lambda _: texts, weights_only=True, group=None)
    return step_folder(root, 0)
