"""Read the .metadata of torch's DCP, and compare a folder's files with it.

`.metadata` is a pickle. Only the classes below are created from it; any other name is refused
before anything is called, so that an untrusted folder runs no code.
"""

import io
import pickle
from collections.abc import Iterator
from math import prod
from pathlib import PurePosixPath
from pkgutil import resolve_name
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from titanlite.checkpoint.manifest import DCP_METADATA
from titanlite.errors import UserError, first_line, some_of
from titanlite.runtime.store import LocalPath

_CLASSES = {
    "torch.distributed.checkpoint.metadata": """Metadata BytesStorageMetadata
        TensorStorageMetadata TensorProperties ChunkStorageMetadata MetadataIndex StorageMeta
        _MEM_FORMAT_ENCODING""",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.serialization": "_get_layout",
    "torch": "Size",
}


class _Unpickler(pickle.Unpickler):
    """Creates the objects in a `.metadata` of torch, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _CLASSES.get(module, "").split():
            return resolve_name(f"{module}:{name}")
        if module.partition(".")[0] == "pathlib" and name.endswith("Path"):
            return PurePosixPath  # where it was saved
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise UserError(f"names {module}.{name}, which torch never writes there")


class DCPReader(FileSystemReader):
    """torch's reader of a folder, with this unpickler."""

    def __init__(self, folder: LocalPath) -> None:
        super().__init__(folder)
        self.folder = folder
        self.metadata = self._load()
        found = [*self._faults(self.metadata)]
        if found:
            raise UserError(f"{folder} has changed since it was written:{some_of(found)}")

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata

    def _load(self) -> Metadata:
        path = self.folder / DCP_METADATA
        try:
            metadata = _Unpickler(io.BytesIO(path.read_bytes())).load()
            if not isinstance(metadata, Metadata) or metadata.storage_data is None:
                raise ValueError("no Metadata of files")
            metadata.storage_meta = getattr(metadata, "storage_meta", None) or StorageMeta()
            return metadata
        except OSError:
            raise
        except Exception as error:  # a damaged pickle raises anything
            raise UserError(f"{path}: damaged or not torch's: {first_line(error)}") from None

    def _faults(self, metadata: Metadata) -> Iterator[str]:
        """Yield missing files, files of wrong sizes, and tensors that are not completely stored."""
        ends: dict[str, int] = {}
        for place in metadata.storage_data.values():
            end = place.offset + place.length
            ends[place.relative_path] = max(end, ends.get(place.relative_path, 0))
        present = self.folder.entries()
        for name, end in sorted(ends.items()):
            if name not in present:
                yield f"{name}: missing"
            elif (size := present[name].stat().st_size) != end:
                yield f"{name}: {size:,} bytes, {end:,} were written"
        for key, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                continue
            stored = sum(prod(chunk.sizes) for chunk in entry.chunks)
            if stored != prod(entry.size):
                yield f"{key}: {stored:,} of {prod(entry.size):,} numbers are stored"
