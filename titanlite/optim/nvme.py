"""Optimizer state in a file on a node's disk, streamed through memory in every step.

A step goes through the parameters in pieces. Each of three threads reads the state of a piece, lets
the optimizer update it, and writes it back, bypassing the page cache. The result is bit-identical
to the same optimizer in memory, since no piece cuts the runs in which its kernels work.

Parameters stay in memory, since every all-gather would read them again, in the forward and the
backward pass of each micro-batch.
"""

import fcntl
import mmap
import os
import shutil
import subprocess
import tempfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import nn

from titanlite.config.schema import JobConfig
from titanlite.errors import RunFailed, UserError, format_bytes, print_notice
from titanlite.optim.update import update
from titanlite.parallel.dtensor import local_part, with_shard

_KEY = "training.offload_folder"
_PAGE = 4096
"""A parameter begins at a multiple of this many elements, since direct I/O needs whole pages."""
_NUMEL = _PAGE << 8
"""Elements of a piece; larger ones are not faster."""
_THREADS = 3


class OnDisk(torch.optim.Optimizer):
    """Wraps an optimizer that updates in place, element by element, and keeps its state in a file.

    `state` has the tensors as maps of the file, for checkpoints only: steps read the file.
    """

    is_like_fused_adam = True
    """The inner optimizer skips its steps, and the state is written back as it was read."""
    grad_scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None

    @torch.no_grad()
    def __init__(self, inner: torch.optim.Optimizer, config: JobConfig) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self._inner = inner
        self._folder = config.training.offload_folder
        self._lock = Lock()
        fresh = self._update(self.param_groups[0], torch.zeros(1), torch.zeros(1), {})
        self._keys = [key for key, value in fresh.items() if value.dim()]
        parameters = []
        for group in self.param_groups:
            parameters.extend(group["params"])
        dtype = getattr(torch, config.training.dtype)
        number = len(self._keys)
        size = (sum(map(_whole, parameters)) + _PAGE) * number
        self._file = reserve(self._folder, size * dtype.itemsize)
        mapped = mmap.mmap(self._file.fileno(), size * dtype.itemsize)
        rest = torch.frombuffer(mapped, dtype=dtype).view(number, -1)
        for parameter in parameters:
            local = local_part(parameter)
            state = self.state[parameter] = {key: value * 0 for key, value in fresh.items()}
            for key, row in zip(self._keys, rest, strict=True):
                state[key] = with_shard(parameter, row[: local.numel()].view(local.shape))
                region = [n * dtype.itemsize for n in (row.storage_offset(), _whole(local))]
                state[key].let_go = partial(mapped.madvise, mmap.MADV_DONTNEED, *region)
            rest = rest[:, _whole(local) :]
        # Shared memory, since a fork would replace private pages during a direct read.
        memory = mmap.mmap(-1, _THREADS * number * _NUMEL * dtype.itemsize)
        self._slots = [*torch.frombuffer(memory, dtype=dtype).view(_THREADS, number, -1)]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        pieces = []
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    numbers = {key: state[key] for key in state.keys() - self._keys}
                    tensors = parameter, parameter.grad, *[state[key] for key in self._keys]
                    cut = [local_part(tensor).view(-1).split(_NUMEL) for tensor in tensors]
                    # An empty shard has one piece too, since its steps are counted.
                    pieces += [(group, state, numbers, *each) for each in zip(*cut, strict=True)]
        with ThreadPoolExecutor(_THREADS) as threads:
            list(threads.map(self._stream, pieces))  # raises a thread's error

    def _stream(self, piece: Any) -> None:
        """Update a piece of a parameter, in a thread."""
        group, state, numbers, values, gradient, *kept = piece
        slot = self._slots.pop()
        self._move(os.preadv, kept, slot)
        tensors = dict(zip(self._keys, slot[:, : len(values)], strict=True))
        with self._lock:
            # All pieces start from the numbers before the step.
            updated = self._update(group, values, gradient, deepcopy(numbers) | tensors)
        state.update((key, updated[key]) for key in numbers)
        self._move(os.pwritev, kept, slot)
        self._slots.append(slot)

    def _update(self, group: Any, values: Any, gradient: Any, state: Any) -> Any:
        """Let the inner optimizer update values and their state, and return it."""
        part = nn.Parameter(values)
        part.grad = gradient
        self._inner.param_groups = [{**group, "params": [part]}]
        self._inner.state = defaultdict(dict, {part: state})
        update(self._inner, self.grad_scale, self.found_inf)
        return state

    def _move(self, call: Any, kept: Any, slot: torch.Tensor) -> None:
        """Read or write the state of a piece."""
        descriptor = self._file.fileno()
        for row, memory in zip(kept, slot, strict=True):
            content = memory[: _whole(row)].view(torch.uint8).numpy()
            try:
                done = call(descriptor, [content], row.storage_offset() * row.itemsize)
                if done < content.nbytes:
                    raise OSError(0, f"{done} of {content.nbytes} bytes")
            except OSError as error:
                why = f"optimizer state cannot be read or written: {error.strerror}"
                raise RunFailed(why, _KEY, self._folder) from None
        # Drops what a checkpoint has cached, or without O_DIRECT also what a step has.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _whole(tensor: torch.Tensor) -> int:
    """Return the elements that a row of the file reserves for a tensor."""
    return -(-local_part(tensor).numel() // _PAGE) * _PAGE


def reserve(folder: str, size: int) -> Any:
    """Return a file of `size` bytes, which bypasses the page cache.

    It has no name, so that nothing is left of it however the process ends.
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
