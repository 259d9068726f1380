"""A value of the device that the host reads a step later, without waiting for it."""

import torch


class LateCopy:
    """An asynchronous copy of a tensor on the host, to be read a step later."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values
        self._copied: torch.cuda.Event | None = None
        if values.is_cuda:
            pinned = torch.empty_like(values, device="cpu", pin_memory=True)
            self._values = pinned.copy_(values, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> list[float]:
        if self._copied is not None:
            self._copied.synchronize()
        return [value.item() for value in self._values]
