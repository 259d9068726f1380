"""Notice a loss or a gradient norm that is not finite, on all ranks at the same step, without waiting for the device.

Every rank keeps the step of its first bad value on the device. The flag travels with the next step's count of valid
tokens (no collective of its own), is copied to the host while the step runs, and is read one step later.
"""

import torch
import torch.distributed as dist

from titanlite.errors import RunFailed
from titanlite.runtime.distributed import gather_objects


class NonFinite(RunFailed):
    """Training met a value that is not finite."""


class NonFiniteGuard:
    """Watch the loss and the gradient norm of every step.

    In each step call `raise_if_set`, `all_reduce_tokens` and `record`, in this order.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup) -> None:
        self._device, self._group = device, group
        self._first_bad = torch.zeros(2, dtype=torch.int64, device=device)  # step of the loss, of the norm
        self._on_host: torch.Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    def raise_if_set(self) -> None:
        """Raise NonFinite, on all ranks, if the flag that the last reduction carried was set."""
        if self._copied is not None:
            self._copied.synchronize()  # recorded a step ago
        if self._on_host is None or not self._on_host.item():
            return
        all_first_bad = gather_objects(self._first_bad.tolist(), dist.group.WORLD)
        step = min(step for steps in all_first_bad for step in steps if step)
        ranks = [str(rank) for rank, (loss_step, _) in enumerate(all_first_bad) if loss_step == step]
        what = f"the loss of rank {', '.join(ranks)}" if ranks else "the gradient norm"
        raise NonFinite(f"at step {step} {what} was not finite; nothing was saved after it")

    def all_reduce_tokens(self, valid_tokens: torch.Tensor) -> torch.Tensor:
        """Return the sum of the valid tokens over all ranks, and send the flag along."""
        sums = torch.stack([valid_tokens, (self._first_bad > 0).any().to(torch.int64)])
        dist.all_reduce(sums, group=self._group)
        if self._device.type == "cuda":
            self._on_host = torch.empty((), dtype=torch.int64, pin_memory=True).copy_(sums[1], non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        else:
            self._on_host = sums[1]
        return sums[0]

    def record(self, step: int, loss: torch.Tensor, norm: torch.Tensor) -> None:
        """Remember the step if this is the first bad value."""
        bad = torch.stack([~torch.isfinite(loss), ~torch.isfinite(norm)])
        self._first_bad = torch.where(bad & (self._first_bad == 0), step, self._first_bad)

    def flush(self) -> None:
        """Wait for the flag of the last step: before it is saved, and when training ends."""
        self.all_reduce_tokens(torch.zeros((), dtype=torch.int64, device=self._device))
        self.raise_if_set()
