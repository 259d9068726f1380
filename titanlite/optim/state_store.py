"""Where streamed optimizer state is kept: with the parameters, in the host's memory, or in a file
on a node's disk. Each of these has a row of elements for each of the optimizer's tensors.
"""

import fcntl
import mmap
import os
import shutil
import subprocess
import tempfile
from typing import Any

import torch

from titanlite.errors import RunFailed, UserError, format_bytes, print_notice
from titanlite.runtime.host_memory import lock_pages

ALIGNMENT = 4096
"""A row, and each parameter in it, begins at a multiple of this many elements, since direct I/O
needs whole pages.
"""
_KEY = "optimizer.state_folder"


class OnDevice:
    """Rows on the parameters' device, used in place."""

    blocks = False
    """Whether a read or write blocks its thread."""

    def __init__(self, rows: int, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.rows = torch.zeros(rows, numel, dtype=dtype, device=device)

    def buffer(self, slot: int, numel: int) -> torch.Tensor:
        """Return device memory for `numel` elements of each row, for one step."""
        return self.rows[:, :0]

    def read(self, slot: int, buffer: torch.Tensor, piece: slice) -> torch.Tensor:
        """Return a piece of the rows as memory to update: the buffer, unless the rows are on the
        device.
        """
        return self.rows[:, piece]

    def write(self, slot: int, updated: torch.Tensor, piece: slice) -> None:
        """Write back a piece that was read and updated."""

    def free(self, part: torch.Tensor) -> None:
        """Free the memory of a part of a row that a checkpoint has read or written."""


class OnHost(OnDevice):
    """Rows in the host's memory, page-locked if the parameters are on a GPU."""

    def __init__(self, rows: int, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(rows, numel, dtype, torch.device("cpu"))
        self._device = device
        if device.type == "cuda":
            lock_pages(self.rows, self)

    def buffer(self, slot: int, numel: int) -> torch.Tensor:
        return self.rows.new_empty(len(self.rows), numel, device=self._device)

    def read(self, slot: int, buffer: torch.Tensor, piece: slice) -> torch.Tensor:
        return _copy(self.rows[:, piece], buffer)

    def write(self, slot: int, updated: torch.Tensor, piece: slice) -> None:
        _copy(updated, self.rows[:, piece])


class OnDisk(OnDevice):
    """Rows in an unnamed file; `rows` maps it, for checkpoints only."""

    blocks = True

    def __init__(
        self, rows: int, numel: int, dtype: torch.dtype, device: torch.device,
        folder: str, slots: int, most: int,
    ) -> None:  # fmt: skip
        """A piece has at most `most` elements; `slots` of them are read or written at a time."""
        self._folder = folder
        self._device = device
        size = rows * numel * dtype.itemsize
        self._file = reserve(folder, size)
        self._map = mmap.mmap(self._file.fileno(), size)
        self.rows = torch.frombuffer(self._map, dtype=dtype).view(rows, numel)
        # Shared memory, since a fork would replace private pages during a direct read.
        memory = mmap.mmap(-1, slots * rows * most * dtype.itemsize)
        passed = torch.frombuffer(memory, dtype=dtype)
        if device.type == "cuda":
            lock_pages(passed, self)
        self._passed = passed.view(slots, rows, most)

    def buffer(self, slot: int, numel: int) -> torch.Tensor:
        if self._device.type == "cpu":
            return self._passed[slot]
        return torch.empty_like(self._passed[slot], device=self._device)

    def read(self, slot: int, buffer: torch.Tensor, piece: slice) -> torch.Tensor:
        self._move(os.preadv, slot, piece)
        if self._device.type == "cpu":
            return buffer
        return _copy(self._passed[slot, :, : piece.stop - piece.start], buffer)

    def write(self, slot: int, updated: torch.Tensor, piece: slice) -> None:
        if self._device.type != "cpu":
            _copy(updated, self._passed[slot])
            torch.cuda.current_stream().synchronize()
        self._move(os.pwritev, slot, piece)

    def free(self, part: torch.Tensor) -> None:
        begin = int(part.storage_offset()) * part.itemsize
        self._map.madvise(mmap.MADV_DONTNEED, begin, part.nbytes)

    def _move(self, call: Any, slot: int, piece: slice) -> None:
        """Read or write a piece of each row."""
        descriptor = self._file.fileno()
        for row, memory in zip(self.rows[:, piece], self._passed[slot], strict=True):
            content = memory[: len(row)].view(torch.uint8).numpy()
            try:
                done = call(descriptor, [content], row.storage_offset() * row.itemsize)
                if done < content.nbytes:
                    raise OSError(0, f"{done} of {content.nbytes} bytes")
            except OSError as error:
                why = f"optimizer state cannot be read or written: {error.strerror}"
                raise RunFailed(why, _KEY, self._folder) from None
        # Drops what a checkpoint has cached, and without O_DIRECT also what a step has cached.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _copy(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Copy a piece of each row to the beginning of another's, and return that.

    This is done row by row, since torch would copy pieces of several rows through a buffer of its
    own.
    """
    target = target[:, : source.size(1)]
    for one, other in zip(source, target, strict=True):
        other.copy_(one, non_blocking=True)
    return target


def reserve(folder: str, size: int) -> Any:
    """Return a file of `size` bytes, which bypasses the page cache.

    It has no name, so that nothing of it remains however the process ends.
    """
    try:
        file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        try:
            kind = subprocess.check_output(["stat", "-fc%T", folder], text=True).strip()
            if kind in ("tmpfs", "ramfs"):
                raise OSError(0, f"{kind} is memory, name a folder on a disk")
            free = shutil.disk_usage(folder).free
            if free < size:
                raise OSError(0, f"{format_bytes(free)} are free")
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError:
            file.close()  # otherwise blocks reserved before the failure would stay
            raise
    except OSError as error:
        why = f"cannot hold {format_bytes(size)} of optimizer state: {error.strerror}"
        raise UserError(why, _KEY, folder) from None
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, os.O_DIRECT)
    except OSError:
        print_notice(f'{_KEY} = "{folder}" has no O_DIRECT: going through the page cache')
    return file
