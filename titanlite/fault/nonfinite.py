"""Notice a loss or a gradient norm that is not finite, and a request to stop, on all ranks at the same step, without
waiting for the device.

Every rank keeps the step of its first bad value on the device. The flag travels with the next step's count of valid
tokens (no collective of its own), and so does a request to stop; they are copied to the host while the step runs, and
are read when it is taken.
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

    In each step call `all_reduce_tokens`, `record` and `read`, in this order. All ranks take part, since any may be
    asked to stop; `tp` of them count the same tokens.
    """

    def __init__(self, device: torch.device, tp: int) -> None:
        self._device, self._tp = device, tp
        self._first_bad = torch.zeros(2, dtype=torch.int64, device=device)  # step of the loss, of the norm
        self._flags: LateCopy | None = None

    def read(self) -> bool:
        """Raise NonFinite, on all ranks, if the last reduction carried the flag; return whether it carried a request
        to stop."""
        bad, stop = self._flags.read() if self._flags else (0, 0)
        if not bad:
            return bool(stop)
        all_first_bad = gather_objects(self._first_bad.tolist(), dist.group.WORLD)
        step = min(step for steps in all_first_bad for step in steps if step)
        ranks = [str(rank) for rank, (loss_step, _) in enumerate(all_first_bad) if loss_step == step]
        what = f"the loss of rank {', '.join(ranks)}" if ranks else "the gradient norm"
        raise NonFinite(f"at step {step} {what} was not finite; nothing was saved after it")

    def all_reduce_tokens(self, valid_tokens: torch.Tensor, stop: bool = False) -> torch.Tensor:
        """Return the sum of the valid tokens over all data, and send the flag and a request to stop along."""
        bad = (self._first_bad > 0).any().to(torch.int64)
        sums = self._all_reduce(torch.stack([valid_tokens, bad, torch.full_like(bad, stop)]))
        self._flags = LateCopy(sums[1:])
        return sums[0] // self._tp

    def _all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(values)
        return values

    def record(self, step: int, loss: torch.Tensor, norm: torch.Tensor) -> torch.Tensor | None:
        """Remember the step if this is the first bad value; return whether to skip its update, None for never."""
        bad = torch.stack([~torch.isfinite(loss), ~torch.isfinite(norm)])
        self._first_bad = torch.where(bad & (self._first_bad == 0), step, self._first_bad)

    def flush(self) -> None:
        """Wait for the flag of the last step: before it is saved, and when training ends."""
        self.all_reduce_tokens(torch.zeros((), dtype=torch.int64, device=self._device))
        self.read()

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the steps so far."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the last step of a checkpoint."""


class LateCopy:
    """A copy of a tensor on the host that is made without waiting, to be read a step later."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values, self._copied = values, None
        if values.is_cuda:
            self._values = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> list[float]:
        if self._copied is not None:
            self._copied.synchronize()
        return [value.item() for value in self._values]
