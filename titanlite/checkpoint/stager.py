"""The copy of a state in host memory that a save writes while training continues."""

import time
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.staging import AsyncStager

from titanlite.checkpoint.plan import flat, nested
from titanlite.parallel.dtensor import let_go, local_part, with_shard
from titanlite.runtime.host_memory import lock_pages


class Stager(AsyncStager):
    """Copies tensors to memory that is kept for the next save. From a GPU this happens while
    training continues: call `wait` before they change, and `synchronize` before the copies are
    read.
    """

    should_synchronize_after_execute = False  # type: ignore[assignment]

    def __init__(
        self, gpu: torch.device | None = None, changed_by_forward: Collection[str] = ()
    ) -> None:
        self.seconds = 0.0
        """Time of the last copy; from a GPU, only of its start."""
        self._gpu = gpu
        self._at_once = changed_by_forward
        self._copies: dict[str, torch.Tensor] = {}
        self._stream: Any = torch.cuda.Stream() if gpu else None
        self._copied: Any = None

    @torch.no_grad()
    def stage(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        began = time.monotonic()
        tensors = flat(state_dict)
        self._allocate({name: t for name, t in tensors.items() if name not in self._copies})
        later = []
        for name, tensor in tensors.items():
            copy = local_part(self._copies[name])
            part = local_part(tensor).detach()
            if self._gpu and name not in self._at_once:
                later.append((copy, part, tensor))
            else:
                copy.copy_(part, non_blocking=self._gpu is not None)
                let_go(tensor)
        if self._stream:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for copy, part, tensor in later:
                    copy.copy_(part, non_blocking=True)
                    let_go(tensor)
            self._copied = self._stream.record_event()
        self.seconds = time.monotonic() - began
        return nested({name: self._copies[name] for name in tensors})

    def _allocate(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Allocate one block for all."""
        if not tensors:
            return
        sizes = [-(-local_part(tensor).nbytes // 64) * 64 for tensor in tensors.values()]
        block = torch.empty(sum(sizes), dtype=torch.uint8)
        if self._gpu:
            lock_pages(block, self)
        for (name, tensor), room in zip(tensors.items(), block.split(sizes), strict=True):
            part = local_part(tensor)
            copy = room[: part.nbytes].view(part.dtype).view(part.shape)
            self._copies[name] = with_shard(tensor, copy)

    def synchronize_staging(self) -> None: ...

    def close(self) -> None: ...

    def wait(self) -> None:
        """Make the GPU's next work, which changes the state, wait for the copy."""
        if self._copied:
            self._copied.wait()

    def synchronize(self) -> None:
        """Wait until the copy is complete; any thread may call this."""
        if self._copied:
            with torch.cuda.device(self._gpu):  # otherwise a context opens on the first GPU
                self._copied.synchronize()
