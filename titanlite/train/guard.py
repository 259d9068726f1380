"""Stop all ranks at the same step on a non-finite value or a stop request.

The values are the loss and the gradient norm, and detection never waits for the device. Every rank
keeps the step of its first bad value on the device. This flag and a stop request are summed
together with the next step's count of valid tokens, without a separate collective; both sums are
copied to the host asynchronously, and read after the step.
"""

import math
from collections.abc import Callable
from functools import cache
from itertools import chain
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from titanlite.config.schema import FaultSection
from titanlite.errors import GivenUp, RunFailed
from titanlite.runtime.distributed import gather_objects

PERIOD = 1000
"""At most fault.skip_budget steps may be skipped in this many."""
_NEVER = 2**62
Note = Callable[[int, str, dict[str, float]], None]
"""Called on every rank with a bad step's number, a line for the log, and metrics."""
LateValues = Callable[[], list[float]]
"""Returns values once they are on the host."""


def late_copy(values: torch.Tensor) -> LateValues:
    """Read device values on the host one step later, without blocking the device.

    Return a function that returns them once they have arrived.
    """
    arrived = None
    if values.is_cuda:
        pinned = torch.empty_like(values, device="cpu", pin_memory=True)
        values = pinned.copy_(values, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()

    def read() -> list[float]:
        if arrived:
            arrived.synchronize()
        return [value.item() for value in values]

    return read


class NonFinite(RunFailed):
    """Training produced a value that is not finite."""


class StepGuard:
    """Watch the loss and the gradient norm of every step.

    In each step call `exchange`, `record` and `read`, in this order. All ranks take part, since any
    may receive a stop request; `tp` of them count the same tokens.
    """

    def __init__(
        self,
        settings: FaultSection,
        device: torch.device,
        tp: int,
        note: Note = lambda *_: None,
        copy: Callable[[torch.Tensor], LateValues] = late_copy,
    ) -> None:
        self._tp = tp
        self._copy = copy
        self._first_bad = torch.full((2,), _NEVER, device=device)
        """The steps of the first bad loss and of the first bad norm."""
        self._read_flags: LateValues | None = None
        self._bad_steps: BadSteps | None = None
        """None if non-finite values end the run and spike detection is off."""
        if settings.on_nonfinite == "skip" or settings.spike_sigma:
            self._bad_steps = BadSteps(settings, device, note, copy)

    def exchange(
        self, valid_tokens: torch.Tensor, stop: bool = False
    ) -> Callable[[], torch.Tensor]:
        """Start to sum the valid tokens over all data; return a function that waits for the sum.

        The flag of a bad value and a stop request are summed with it. The sum is at least one, so
        that a batch without valid tokens has a loss of 0.
        """
        bad = (self._first_bad < _NEVER).any().to(torch.int64)
        sums = torch.stack([valid_tokens, bad, torch.full_like(bad, stop)])
        if self._bad_steps:
            sums = self._bad_steps.with_loss(sums)
        work = dist.all_reduce(sums, async_op=True)

        @cache
        def wait() -> torch.Tensor:
            work.wait()
            if self._bad_steps:
                self._bad_steps.judge_loss(sums[3] / self._tp)
            self._read_flags = self._copy(sums[1:3])
            return (sums[0].long() // self._tp).clamp(min=1)

        return wait

    def record(self, step: int, loss: torch.Tensor, norm: torch.Tensor) -> torch.Tensor | None:
        """Record the step if this is the first bad value.

        Return whether to skip its update, None for never.
        """
        norm = norm.to(loss.device)  # that of offloaded gradients is on the CPU
        skipped = None
        if self._bad_steps:
            skipped, loss, norm = self._bad_steps.record(step, loss, norm)
        values = torch.stack([loss, norm])
        bad = values - values != 0  # inf - inf is NaN
        self._first_bad = torch.minimum(self._first_bad, self._first_bad.masked_fill(bad, step))
        return skipped

    def read(self) -> bool:
        """Return whether the last exchange carried a stop request, and act on bad steps.

        Raise NonFinite, on all ranks, if it carried the flag of a bad value.
        """
        if not self._read_flags:
            return False
        bad, stop = self._read_flags()
        if not bad:
            if self._bad_steps:
                self._bad_steps.act()
            return bool(stop)
        all_first_bad: list[list[int]] = gather_objects(self._first_bad.tolist(), dist.group.WORLD)
        step = min(chain.from_iterable(all_first_bad))
        ranks = [str(rank) for rank, steps in enumerate(all_first_bad) if steps[0] == step]
        what = "the gradient norm"
        if ranks:
            what = f"the loss of rank {', '.join(ranks)}"
        raise NonFinite(f"at step {step} {what} was not finite; nothing was saved after it")

    def flush(self) -> None:
        """Wait for the flag of the last step: before the step is saved, and when training ends."""
        self.exchange(torch.zeros_like(self._first_bad[0]))()
        self.read()

    def state_dict(self) -> dict[str, Any]:
        """Return the guard's state for a checkpoint."""
        if self._bad_steps:
            return self._bad_steps.state_dict()
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the last step of a checkpoint."""
        if self._bad_steps:
            self._bad_steps.load_state_dict(state)


class Spike(Exception):
    """Raised after a step from which all ranks go back to an earlier checkpoint."""

    def __init__(self, step: int, why: str) -> None:
        super().__init__(why)
        self.step = step


def skips_updates(settings: FaultSection) -> bool:
    """Return whether a bad step may be skipped."""
    if settings.on_nonfinite == "skip":
        return True
    return settings.spike_sigma > 0 and settings.on_spike == "skip"


class BadSteps:
    """Detect bad steps identically on all ranks, and skip them or roll back.

    A step is bad if its gradient norm, which is the same on all ranks, is not finite, or is above
    mean + spike_sigma x standard deviation of the last spike_window good steps. (Until there are
    that many, nothing is too large.) The loss is compared in the same way, but it is summed with
    the next step's tokens, after the update. The host reads both values yet another step later.
    """

    def __init__(
        self,
        settings: FaultSection,
        device: torch.device,
        note: Note,
        copy: Callable[[torch.Tensor], LateValues] = late_copy,
    ) -> None:
        self._copy = copy
        self._settings: FaultSection = settings
        self._note = note
        self._norms = Window(settings, device)
        self._losses = Window(settings, device)
        self._skips: list[int] = []
        """The steps skipped among the last PERIOD."""
        self._rollbacks = 0
        self._nothing = torch.full((), math.nan, dtype=torch.float64, device=device)
        self._forget()

    def _forget(self) -> None:
        self._step = 0
        self._norm = self._nothing
        self._loss = self._nothing
        """This rank's part of the last step's loss, until it is summed."""
        self._judged: list[tuple[int, LateValues]] = []
        """Steps with their norm, its limit, their loss and its limit, which are not read yet."""

    def record(
        self, step: int, loss: torch.Tensor, norm: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """Judge the step's norm.

        Return whether to skip its update, None for never, and the loss and norm that must be
        finite, which are 0 in a skipped step.
        """
        limit, above = self._norms.judge(norm.double())
        broken = ~norm.isfinite()
        skipped = broken
        if self._settings.on_spike == "skip":
            skipped = broken | above
        self._step = step
        self._norm = torch.stack([norm.double(), limit])
        self._loss = torch.where(broken | above, math.nan, loss.double())
        if self._settings.on_nonfinite == "skip":
            # Only a bad loss with a finite norm still stops the run.
            loss = torch.where(skipped, 0, loss)
            norm = torch.where(skipped, 0, norm)
        if not skips_updates(self._settings):
            return None, loss, norm
        return skipped, loss, norm

    def with_loss(self, values: torch.Tensor) -> torch.Tensor:
        """Return integers, exact in float64 up to 2^53, and the last step's loss, to be summed."""
        return torch.cat([values.double(), self._loss[None]])

    def judge_loss(self, loss: torch.Tensor) -> None:
        """Compare the last step's loss with its limit."""
        if self._step:
            limit, _ = self._losses.judge(loss)
            judged = torch.cat([self._norm, torch.stack([loss, limit])])
            self._judged.append((self._step, self._copy(judged)))
            self._step = 0
            self._loss = self._nothing

    def act(self) -> None:
        """Act on the steps judged so far."""
        while self._judged:
            step, read = self._judged.pop(0)
            self._act(step, *read())

    def _act(
        self, step: int, norm: float, norm_limit: float, loss: float, loss_limit: float
    ) -> None:
        """Apply fault.on_nonfinite or fault.on_spike to a step, if it was bad."""
        action = self._settings.on_spike
        if not math.isfinite(norm):
            why = "its gradient norm is not finite"
            action = self._settings.on_nonfinite
        elif norm > norm_limit:
            why = f"its gradient norm {norm:.4g} is above {norm_limit:.4g}"
        elif loss > loss_limit:
            why = f"its loss {loss:.5g} is above {loss_limit:.5g}"
            if action == "skip":  # too late: the loss becomes known after the update
                action = "warn"
        else:
            return
        numbers = {
            "bad_norm": norm,
            "norm_limit": norm_limit,
            "bad_loss": loss,
            "loss_limit": loss_limit,
        }
        if action == "skip":
            used = self._count_skip(step, why)
            note = f"step {step} was skipped: {why} ({used})"
            self._note(step, note, {**numbers, "skipped": 1})
        elif action == "rollback":
            self._roll_back(step, why)
        elif action == "warn":
            self._note(step, f"step {step} is a spike: {why}", {**numbers, "skipped": 0})

    def _count_skip(self, step: int, why: str) -> str:
        """Count a skipped step; return the state of the budget, and raise once it is used up."""
        budget = self._settings.skip_budget
        recent = [skip for skip in self._skips if skip > step - PERIOD]
        self._skips = [*recent, step]
        used = f"{len(self._skips)} in {PERIOD:,} steps; fault.skip_budget = {budget}"
        if len(self._skips) > budget:
            raise GivenUp(f"step {step} is one bad step too many: {why} ({used})")
        return used

    def _roll_back(self, step: int, why: str) -> NoReturn:
        budget = self._settings.rollback_budget
        self._rollbacks += 1
        used = f"rollback {self._rollbacks}; fault.rollback_budget = {budget}"
        if self._rollbacks > budget:
            raise GivenUp(f"step {step} is one spike too many: {why} ({used})")
        raise Spike(step, f"step {step}: {why} ({used})")

    def state_dict(self) -> dict[str, Any]:
        return {
            "norms": self._norms.state(),
            "losses": self._losses.state(),
            "skips": self._skips,
            "rollbacks": self._rollbacks,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the last step of a checkpoint.

        Skips and rollbacks of this process stay counted.
        """
        self._forget()
        self._norms.load(state.get("norms", []))
        self._losses.load(state.get("losses", []))
        self._skips = sorted({*self._skips, *state.get("skips", [])})
        self._rollbacks = max(self._rollbacks, state.get("rollbacks", 0))


class Window:
    """The values of the last good steps, on the device; until it is full, the limit is NaN."""

    def __init__(self, settings: FaultSection, device: torch.device) -> None:
        self._sigma = settings.spike_sigma
        self._size = 0
        if settings.spike_sigma > 0:
            self._size = settings.spike_window
        self._values = torch.full((self._size,), math.nan, dtype=torch.float64, device=device)

    def judge(self, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the limit, and whether the value is above it.

        A finite value that is not above it enters the window.
        """
        mean = self._values.mean()
        limit = mean + self._sigma * (self._values - mean).square().mean().sqrt()
        above = value > limit
        kept = torch.cat([self._values, value[None]])[1:]
        self._values = torch.where(value.isfinite() & ~above, kept, self._values)
        return limit, above

    def state(self) -> list[float]:
        return [value for value in self._values.tolist() if math.isfinite(value)]

    def load(self, values: list[float]) -> None:
        empty = [math.nan] * self._size
        padded = torch.tensor(empty + values, dtype=torch.float64)
        self._values = padded[len(padded) - self._size :].to(self._values.device)
