"""Detect values that are not finite, and requests to stop, on all ranks at the same step.

The values are the loss and the gradient norm, and detection never waits for the device. Every rank
keeps the step of its first bad value on the device. This flag is summed with the next step's count
of valid tokens (no collective of its own), and so is a request to stop; both sums are copied to the
host asynchronously, and read after the step.
"""

from typing import Any

import torch
import torch.distributed as dist

from titanlite.errors import RunFailed
from titanlite.runtime.distributed import gather_objects


class NonFinite(RunFailed):
    """Training met a value that is not finite."""


class NonFiniteGuard:
    """Watch the loss and the gradient norm of every step.

    In each step call `all_reduce_tokens`, `record` and `read`, in this order. All ranks take part,
    since any may get a request to stop; `tp` of them count the same tokens.
    """

    def __init__(self, device: torch.device, tp: int) -> None:
        self._device = device
        self._tp = tp
        self._first_bad = torch.zeros(2, dtype=torch.int64, device=device)
        """The steps of the first bad loss and of the first bad norm; 0 for none."""
        self._flags: LateCopy | None = None

    def read(self) -> bool:
        """Return whether the last reduction carried a request to stop.

        Raise NonFinite, on all ranks, if it carried the flag of a bad value.
        """
        if not self._flags:
            return False
        bad, stop = self._flags.read()
        if not bad:
            return bool(stop)
        all_first_bad = gather_objects(self._first_bad.tolist(), dist.group.WORLD)
        step = min(step for steps in all_first_bad for step in steps if step)
        ranks = [str(rank) for rank, steps in enumerate(all_first_bad) if steps[0] == step]
        what = "the gradient norm"
        if ranks:
            what = f"the loss of rank {', '.join(ranks)}"
        raise NonFinite(f"at step {step} {what} was not finite; nothing was saved after it")

    def all_reduce_tokens(self, valid_tokens: torch.Tensor, stop: bool = False) -> torch.Tensor:
        """Return the sum of the valid tokens over all data.

        The flag of a bad value and a request to stop are summed along.
        """
        bad = (self._first_bad > 0).any().to(torch.int64)
        sums = self._all_reduce(torch.stack([valid_tokens, bad, torch.full_like(bad, stop)]))
        self._flags = LateCopy(sums[1:])
        return sums[0] // self._tp

    def _all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(values)
        return values

    def record(self, step: int, loss: torch.Tensor, norm: torch.Tensor) -> torch.Tensor | None:
        """Record the step if this is the first bad value.

        Return whether to skip its update, None for never.
        """
        bad = torch.stack([~torch.isfinite(loss), ~torch.isfinite(norm)])
        self._first_bad = torch.where(bad & (self._first_bad == 0), step, self._first_bad)

    def flush(self) -> None:
        """Wait for the flag of the last step: before a save of it, and when training ends."""
        self.all_reduce_tokens(torch.zeros((), dtype=torch.int64, device=self._device))
        self.read()

    def state_dict(self) -> dict[str, Any]:
        """Return the guard's state for a checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the last step of a checkpoint."""


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
