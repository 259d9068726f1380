"""A Hugging Face folder's safetensors files and their index: planned, written, and read by region.

Nothing in such a folder is run as code.
"""

import json
from collections.abc import Sequence
from functools import cache
from itertools import groupby
from operator import attrgetter
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from titanlite.checkpoint.hf.names import HFTensor
from titanlite.errors import UserError, first_line
from titanlite.registry import Box
from titanlite.runtime import store

INDEX = "model.safetensors.index.json"
ONE_FILE = "model.safetensors"
WEIGHT_TYPES = ("F64", "F32", "BF16", "F16")


def split_into_files(tensors: Sequence[HFTensor], max_bytes: int) -> dict[str, list[HFTensor]]:
    """Return files by name, each of at most `max_bytes` or of a single parameter.

    The slices of a parameter stay in one file, so that it is read once.
    """
    files: list[list[HFTensor]] = []
    free = 0
    for _, made in groupby(tensors, attrgetter("parameters")):
        run = [*made]
        size = sum(tensor.nbytes for tensor in run)
        if not files or size > free:
            files.append([])
            free = max_bytes
        files[-1] += run
        free -= size
    found = dict[str, list[HFTensor]]()
    for i, file in enumerate(files, start=1):
        found[f"model-{i:05}-of-{len(files):05}.safetensors"] = file
    return found


def index(files: dict[str, list[HFTensor]]) -> bytes:
    """Return the index document, which has the file of each tensor."""
    weight_map = {}
    total = 0
    for name, file in files.items():
        for tensor in file:
            weight_map[tensor.name] = name
            total += tensor.nbytes
    content = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return (json.dumps(content, indent=2) + "\n").encode()


def write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write a file of tensors in host memory, and sync it to disk."""
    save_file(tensors, path, metadata={"format": "pt"})
    store.share(path)
    store.sync(path)


class SafetensorsReader:
    """Reads the tensors of a folder with an index, or with one file.

    `faults` lists missing and unusable parts.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.faults: list[str] = []
        self._file_of: dict[str, str] = {}
        self._open = cache(lambda name: safe_open(self.folder / name, framework="pt"))
        for file, indexed in self._indexed_files().items():
            try:
                opened = self._open(file)
            except (OSError, SafetensorError) as error:
                self.faults.append(f"{file}: {first_line(error)}")
                continue
            present = set(opened.keys())
            for name in sorted(indexed - present):
                self.faults.append(f"{name}: not in {file}, where the index has it")
            for name in sorted(present):
                part = opened.get_slice(name)
                self.shapes[name] = tuple(part.get_shape())
                self._file_of[name] = file
                if part.get_dtype() not in WEIGHT_TYPES:
                    self.faults.append(
                        f"{name}: {part.get_dtype()}, but weights are {', '.join(WEIGHT_TYPES)}"
                    )

    def _indexed_files(self) -> dict[str, set[str]]:
        """Return the files, and the tensors of each according to the index."""
        path = self.folder / INDEX
        if not path.exists():
            if not (self.folder / ONE_FILE).exists():
                raise UserError(
                    f"{self.folder} is not a Hugging Face model folder: "
                    f"it has no {INDEX} or {ONE_FILE}"
                )
            return {ONE_FILE: set()}
        files: dict[str, set[str]] = {}
        try:
            for name, file in json.loads(path.read_bytes())["weight_map"].items():
                if Path(file).name != file:
                    raise ValueError(f"{file} is not a file name")
                files.setdefault(file, set()).add(name)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} is not a valid index: {first_line(error)}") from None
        return files

    def read(self, name: str, region: Box) -> torch.Tensor:
        """Read a region of a tensor, and no other bytes."""
        part = self._open(self._file_of[name]).get_slice(name)
        return part[region] if region else part[...]
