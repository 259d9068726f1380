"""Notice a loss or a gradient norm that is not finite, on all ranks at the same step, without waiting for the device.

Every rank keeps the step of its first bad value on the device. The flag travels with the next step's count of valid
tokens (no collective of its own), is copied to the host while the step runs, and is read one step later.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


class NonFinite(Exception):
    """Training met a value that is not finite."""


class NonFiniteGuard:
    """Call `share` at the start of every step and `record` at its end."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup) -> None:
        self._device, self._group = device, group
        self._first_bad = torch.zeros(2, dtype=torch.int64, device=device)  # step of the loss, of the norm
        self._on_host: torch.Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    def record(self, step: int, loss: torch.Tensor, norm: torch.Tensor) -> None:
        """Remember the step if this is the first bad value."""
        bad = torch.stack([~torch.isfinite(loss), ~torch.isfinite(norm)])
        self._first_bad = torch.where(bad & (self._first_bad == 0), step, self._first_bad)

    def share(self, valid_tokens: torch.Tensor) -> torch.Tensor:
        """Valid tokens over all ranks; stops the run if a rank's flag of the step before last was up."""
        self._stop_if_up()
        shared = torch.stack([valid_tokens, (self._first_bad > 0).any().to(torch.int64)])
        dist.all_reduce(shared, group=self._group)
        if self._device.type == "cuda":
            self._on_host = torch.empty((), dtype=torch.int64, pin_memory=True).copy_(shared[1], non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        else:
            self._on_host = shared[1]
        return shared[0]

    def settle(self) -> None:
        """Wait for the last step's flag: before anything is kept of it, and when training ends."""
        self.share(torch.zeros((), dtype=torch.int64, device=self._device))
        self._stop_if_up()

    def _stop_if_up(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()  # recorded a step ago
        if self._on_host is None or not self._on_host.item():
            return
        mine = self._first_bad.tolist()
        everyone: list[list[int]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, mine)
        found = [
            (step, rank, what)
            for rank, steps in enumerate(everyone)
            for step, what in zip(steps, ("loss", "gradient norm"), strict=True)
            if step
        ]
        first = min(step for step, _, _ in found)
        losses = [rank for step, rank, what in found if step == first and what == "loss"]
        who = f"the loss of rank {', '.join(map(str, losses))}" if losses else "the gradient norm"
        raise NonFinite(f"at step {first} {who} was not finite; nothing was saved after it")
