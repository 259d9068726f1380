"""A folder of safetensors files with an index: written a tensor at a time, read a box at a time.

The library's own writer wants a whole file's tensors in memory at once; the format is a length, a JSON header and
the bytes, so ours holds one tensor. Nothing in such a folder is code.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from titanlite.checkpoint.hf.names import Output
from titanlite.errors import UserError, first_line
from titanlite.registry import Box

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
WEIGHTS = ("F64", "F32", "BF16", "F16")


def size_of(output: Output) -> int:
    return torch.Size(output.shape).numel() * output.dtype.itemsize


def split(outputs: Sequence[Output], limit: int) -> dict[str, list[Output]]:
    """Files by name, each of `limit` bytes or one tensor; the same for any number of ranks."""
    files: list[list[Output]] = []
    room = 0
    for output in outputs:
        if not files or size_of(output) > room:
            files.append([])
            room = limit
        files[-1].append(output)
        room -= size_of(output)
    return {f"model-{i:05}-of-{len(files):05}.safetensors": file for i, file in enumerate(files, start=1)}


def index(files: dict[str, list[Output]]) -> bytes:
    """Which file has which tensor."""
    where = {output.name: name for name, file in files.items() for output in file}
    total = sum(size_of(output) for file in files.values() for output in file)
    return (json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2) + "\n").encode()


class Writer:
    """Writes files one after the other, of tensors that come in their order; each file is fsynced."""

    def __init__(self, folder: Path, files: dict[str, list[Output]]) -> None:
        self._folder, self._files = folder, list(files.items())
        self._left: list[Output] = []
        self._file: Any = None

    def add(self, tensor: torch.Tensor) -> None:
        """The next tensor."""
        if not self._left:
            name, outputs = self._files.pop(0)
            self._file, self._left = (self._folder / name).open("wb"), list(outputs)
            self._file.write(_header(outputs))
        output = self._left.pop(0)
        assert (tuple(tensor.shape), tensor.dtype) == (output.shape, output.dtype), output.name
        self._file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        if not self._left:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()


def _header(outputs: Sequence[Output]) -> bytes:
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for output in outputs:
        offsets = [place, place + size_of(output)]
        table[output.name] = {"dtype": _CODES[output.dtype], "shape": list(output.shape), "data_offsets": offsets}
        place = offsets[1]
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # readers map the bytes after it, which begin aligned
    return len(text).to_bytes(8, "little") + text


class Reader:
    """The tensors of a folder with an index, or with one file; an error where it is not whole."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._file_of: dict[str, str] = {}
        self._open = cache(self._open_file)
        faults = []
        for file, named in self._listed().items():
            try:
                opened = self._open(file)
            except (OSError, SafetensorError) as error:
                faults.append(f"{file}: {first_line(error)}")
                continue
            there = set(opened.keys())
            faults += [f"{name}: the index has it in {file}, which has not" for name in sorted(named - there)]
            for name in sorted(there):
                part = opened.get_slice(name)
                self.shapes[name], self._file_of[name] = tuple(part.get_shape()), file
                if part.get_dtype() not in WEIGHTS:
                    faults.append(f"{name}: {part.get_dtype()}, and weights are one of {', '.join(WEIGHTS)}")
        self.faults = faults

    def _listed(self) -> dict[str, set[str]]:
        """Files, and the tensors that the index says are in each."""
        path = self.folder / INDEX
        if not path.is_file():
            if not (self.folder / SINGLE).is_file():
                raise UserError(f"{self.folder} is no Hugging Face folder: it has neither {INDEX} nor {SINGLE}")
            return {SINGLE: set()}
        try:
            where = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
            files: dict[str, set[str]] = {}
            for name, file in where.items():
                if Path(file).name != file:
                    raise ValueError(f"{file} is no name of a file")
                files.setdefault(file, set()).add(name)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} is no index: {first_line(error)}") from None
        return files

    def _open_file(self, name: str) -> Any:
        return safe_open(self.folder / name, framework="pt")

    def read(self, name: str, box: Box) -> torch.Tensor:
        """A part of a tensor; only its bytes are read."""
        part = self._open(self._file_of[name]).get_slice(name)
        return part[box] if box else part[...]
