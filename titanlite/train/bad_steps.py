"""Steps that would spoil the run, found on all ranks alike: skip them, or go back.

Detection never waits for the device. It compares the gradient norm, which is the same on all ranks:
a step is bad if its norm is not finite, or above mean + spike_sigma x standard deviation of the
last spike_window good steps. (Before there are that many, none is too large.) The loss is compared
in the same way, but it is summed with the next step's tokens, when the update is done. The host
reads both values one step later still.
"""

import math
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from titanlite.config.schema import FaultSection
from titanlite.errors import GivenUp
from titanlite.train.late_copy import late_copy

PERIOD = 1000
"""Of so many steps at most fault.skip_budget may be skipped."""
Note = Callable[[int, str, dict[str, float]], None]
"""Called on all ranks alike with a bad step's number, a line for the log, and metrics."""


class Spike(Exception):
    """A step after which all ranks go back to an earlier checkpoint."""

    def __init__(self, step: int, why: str) -> None:
        super().__init__(why)
        self.step = step


def skips_updates(settings: FaultSection) -> bool:
    """Return whether a bad step may be skipped."""
    if settings.on_nonfinite == "skip":
        return True
    return settings.spike_sigma > 0 and settings.on_spike == "skip"


class Window:
    """The values of the last good steps, on the device: NaN until full, as is the limit."""

    def __init__(self, settings: FaultSection, device: torch.device) -> None:
        self._sigma = settings.spike_sigma
        self._size = settings.spike_window if settings.spike_sigma > 0 else 0
        self._values = torch.full((self._size,), math.nan, dtype=torch.float64, device=device)

    def judge(self, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the limit, and whether the value is above it.

        A finite value that is not above enters the window.
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
        padded = torch.tensor([math.nan] * self._size + values, dtype=torch.float64)
        self._values = padded[len(padded) - self._size :].to(self._values.device)


class BadSteps:
    """Judge every step; the run goes on after a bad one."""

    def __init__(self, settings: FaultSection, device: torch.device, note: Note) -> None:
        self._settings: FaultSection = settings
        self._note = note
        self._norms = Window(settings, device)
        self._losses = Window(settings, device)
        self._skips: list[int] = []
        """The steps that were skipped, of the last PERIOD."""
        self._rollbacks = 0
        self._nothing = torch.full((), math.nan, dtype=torch.float64, device=device)
        self._forget()

    def _forget(self) -> None:
        self._step = 0
        self._norm = self._nothing
        self._loss = self._nothing
        """This rank's part of the last step's loss, until it is summed."""
        self._judged: list[tuple[int, Callable[[], list[float]]]] = []
        """Steps with their norm, its limit, their loss and its limit, not read yet."""

    def record(
        self, step: int, loss: torch.Tensor, norm: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """Judge the step's norm.

        Return whether to skip its update, None for never, and the loss and norm that must be
        finite: of a step that is skipped, none.
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
            # Then only a loss that leaves the norm finite stops the run.
            loss = torch.where(skipped, 0, loss)
            norm = torch.where(skipped, 0, norm)
        if not skips_updates(self._settings):
            return None, loss, norm
        return skipped, loss, norm

    def all_reduce(self, values: torch.Tensor, tp: int) -> torch.Tensor:
        """Sum whole numbers, and the last step's loss with them; compare it with its limit, once.

        Sums of float64 are exact up to 2^53. `tp` ranks have the same loss.
        """
        sums = torch.cat([values.double(), self._loss[None]])
        dist.all_reduce(sums)
        if self._step:
            loss = sums[-1] / tp
            limit, _ = self._losses.judge(loss)
            judged = torch.cat([self._norm, torch.stack([loss, limit])])
            self._judged.append((self._step, late_copy(judged)))
            self._step = 0
            self._loss = self._nothing
        return sums[:-1].to(values.dtype)

    def act(self) -> None:
        """Act on the steps that were judged."""
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
            if action == "skip":  # too late: the update was done before the loss was known
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
