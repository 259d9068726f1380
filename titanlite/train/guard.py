"""The guard of the steps: a value that is not finite, or a request to stop, ends all ranks
together.

The values are the loss and the gradient norm, and detection never waits for the device. Every rank
keeps the step of its first bad value on the device. This flag is summed with the next step's count
of valid tokens (no collective of its own), and so is a request to stop; both sums are copied to the
host asynchronously, and read after the step. What goes on after a bad step is in bad_steps.py.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from titanlite.config.schema import FaultSection
from titanlite.errors import RunFailed
from titanlite.runtime.distributed import gather_objects
from titanlite.train.bad_steps import BadSteps, Note
from titanlite.train.late_copy import late_copy


class NonFinite(RunFailed):
    """Training met a value that is not finite."""


class StepGuard:
    """Watch the loss and the gradient norm of every step.

    In each step call `exchange`, `record` and `read`, in this order. All ranks take part, since any
    may get a request to stop; `tp` of them count the same tokens.
    """

    def __init__(
        self, settings: FaultSection, device: torch.device, tp: int, note: Note = lambda *_: None
    ) -> None:
        self._tp = tp
        self._first_bad = torch.zeros(2, dtype=torch.int64, device=device)
        """The steps of the first bad loss and of the first bad norm; 0 for none."""
        self._read_flags: Callable[[], list[float]] | None = None
        self._bad_steps: BadSteps | None = None
        """None if values that are not finite end the run and spikes are off."""
        if settings.on_nonfinite == "skip" or settings.spike_sigma:
            self._bad_steps = BadSteps(settings, device, note)

    def exchange(self, valid_tokens: torch.Tensor, stop: bool = False) -> torch.Tensor:
        """Return the sum of the valid tokens over all data.

        The flag of a bad value and a request to stop are summed along.
        """
        bad = (self._first_bad > 0).any().to(torch.int64)
        sums = torch.stack([valid_tokens, bad, torch.full_like(bad, stop)])
        if self._bad_steps:
            sums = self._bad_steps.all_reduce(sums, self._tp)
        else:
            dist.all_reduce(sums)
        self._read_flags = late_copy(sums[1:])
        return sums[0] // self._tp

    def record(self, step: int, loss: torch.Tensor, norm: torch.Tensor) -> torch.Tensor | None:
        """Record the step if this is the first bad value.

        Return whether to skip its update, None for never.
        """
        skipped = None
        if self._bad_steps:
            skipped, loss, norm = self._bad_steps.record(step, loss, norm)
        bad = torch.stack([~torch.isfinite(loss), ~torch.isfinite(norm)])
        self._first_bad = torch.where(bad & (self._first_bad == 0), step, self._first_bad)
        return skipped

    def read(self) -> bool:
        """Return whether the last exchange carried a request to stop.

        Raise NonFinite, on all ranks, if it carried the flag of a bad value. Act on bad steps.
        """
        if not self._read_flags:
            return False
        bad, stop = self._read_flags()
        if not bad:
            if self._bad_steps:
                self._bad_steps.act()
            return bool(stop)
        all_first_bad = gather_objects(self._first_bad.tolist(), dist.group.WORLD)
        step = min(step for steps in all_first_bad for step in steps if step)
        ranks = [str(rank) for rank, steps in enumerate(all_first_bad) if steps[0] == step]
        what = "the gradient norm"
        if ranks:
            what = f"the loss of rank {', '.join(ranks)}"
        raise NonFinite(f"at step {step} {what} was not finite; nothing was saved after it")

    def flush(self) -> None:
        """Wait for the flag of the last step: before a save of it, and when training ends."""
        self.exchange(torch.zeros_like(self._first_bad[0]))
        self.read()

    def state_dict(self) -> dict[str, Any]:
        """Return the guard's state for a checkpoint."""
        return self._bad_steps.state_dict() if self._bad_steps else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the last step of a checkpoint."""
        if self._bad_steps:
            self._bad_steps.load_state_dict(state)
