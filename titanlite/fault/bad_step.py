"""Notice a step that would spoil the run, on all ranks alike and without waiting for the device: skip it, or go back.

Judged on the device by the gradient norm, which is the same on all ranks: a step is bad if it is not finite, or above
mean + spike_sigma x standard deviation of the last spike_window good steps (none is, before there are as many). The
loss is judged in the same way, but is summed with the next step's tokens, when the update is done. The host hears of
both a step later still.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from titanlite.config.schema import Fault
from titanlite.errors import GivenUp
from titanlite.fault.nonfinite import LateCopy, NonFiniteGuard

PERIOD = 1000
"""Steps in which fault.skip_budget may be skipped."""
Note = Callable[[int, str, dict[str, float]], None]
"""Called on all ranks alike with the number of a bad step, a line for the log, and numbers for the metrics."""


class Spike(Exception):
    """A step after which all ranks go back to an earlier checkpoint."""

    def __init__(self, step: int, why: str) -> None:
        super().__init__(why)
        self.step = step


def build_guard(settings: Fault, device: torch.device, tp: int, note: Note = lambda *_: None) -> NonFiniteGuard:
    """Return what watches the steps: only for values that are not finite, if these end the run and spikes are off."""
    if settings.on_nonfinite == "stop" and not settings.spike_sigma:
        return NonFiniteGuard(device, tp)
    return BadSteps(settings, device, tp, note)


def skips_updates(settings: Fault) -> bool:
    """Whether a bad step may be skipped."""
    return settings.on_nonfinite == "skip" or (settings.spike_sigma > 0 and settings.on_spike == "skip")


class Window:
    """The values of the last good steps, on the device; before there are as many they are NaN, as is the limit."""

    def __init__(self, settings: Fault, device: torch.device) -> None:
        self._size, self._sigma = settings.spike_window * (settings.spike_sigma > 0), settings.spike_sigma
        self._values = torch.full((self._size,), math.nan, dtype=torch.float64, device=device)

    def judge(self, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the limit, and whether the value is above it; if not, and if it is finite, it counts from now on."""
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


class BadSteps(NonFiniteGuard):
    """A guard that judges every step and lets the run go on."""

    def __init__(self, settings: Fault, device: torch.device, tp: int, note: Note) -> None:
        super().__init__(device, tp)
        self._settings, self._note = settings, note
        self._norms, self._losses = Window(settings, device), Window(settings, device)
        self._skips: list[int] = []
        """The steps that were skipped, of the last PERIOD."""
        self._rollbacks = 0
        self._nothing = torch.full((), math.nan, dtype=torch.float64, device=device)
        self._forget()

    def _forget(self) -> None:
        self._step, self._norm, self._loss = 0, self._nothing, self._nothing  # of a step that was not shared yet
        self._shared: list[tuple[int, LateCopy]] = []

    def record(self, step: int, loss: torch.Tensor, norm: torch.Tensor) -> torch.Tensor | None:
        limit, above = self._norms.judge(norm.double())
        broken = ~norm.isfinite()
        skipped = broken | above if self._settings.on_spike == "skip" else broken
        self._step, self._norm = step, torch.stack([norm.double(), limit])
        self._loss = torch.where(broken | above, math.nan, loss.double())
        if self._settings.on_nonfinite == "skip":  # then only a loss that leaves the norm finite stops the run
            loss, norm = torch.where(skipped, 0, loss), torch.where(skipped, 0, norm)
        super().record(step, loss, norm)
        return skipped if skips_updates(self._settings) else None

    def _all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        """Sum the last step's loss too, once, and judge it; sums of float64 are exact up to 2^53."""
        sums = super()._all_reduce(torch.cat([values.double(), self._loss[None]]))
        if self._step:
            loss = sums[-1] / self._tp
            limit, _ = self._losses.judge(loss)
            self._shared.append((self._step, LateCopy(torch.cat([self._norm, torch.stack([loss, limit])]))))
            self._step, self._loss = 0, self._nothing
        return sums[:-1].to(values.dtype)

    def read(self) -> bool:
        stop = super().read()
        while self._shared:
            step, copy = self._shared.pop(0)
            self._act(step, *copy.read())
        return stop

    def _act(self, step: int, norm: float, norm_limit: float, loss: float, loss_limit: float) -> None:
        """Do what the config says about a step, if it was bad."""
        settings = self._settings
        numbers = {"bad_norm": norm, "norm_limit": norm_limit, "bad_loss": loss, "loss_limit": loss_limit}
        if not math.isfinite(norm):
            what, action = "its gradient norm is not finite", settings.on_nonfinite
        elif norm > norm_limit:
            what, action = f"its gradient norm {norm:.4g} is above {norm_limit:.4g}", settings.on_spike
        elif loss > loss_limit:  # its update was done before the loss was known
            what, action = f"its loss {loss:.5g} is above {loss_limit:.5g}", settings.on_spike
            action = "warn" if action == "skip" else action
        else:
            return
        if action == "skip":
            self._skips = [*(skip for skip in self._skips if skip > step - PERIOD), step]
            used = f"{len(self._skips)} in {PERIOD:,} steps; fault.skip_budget = {settings.skip_budget}"
            if len(self._skips) > settings.skip_budget:
                raise GivenUp(f"step {step} is one bad step too many: {what} ({used})")
            self._note(step, f"step {step} was skipped: {what} ({used})", {**numbers, "skipped": 1})
        elif action == "rollback":
            self._rollbacks += 1
            used = f"rollback {self._rollbacks}; fault.rollback_budget = {settings.rollback_budget}"
            if self._rollbacks > settings.rollback_budget:
                raise GivenUp(f"step {step} is one spike too many: {what} ({used})")
            raise Spike(step, f"step {step}: {what} ({used})")
        elif action == "warn":
            self._note(step, f"step {step} is a spike: {what}", {**numbers, "skipped": 0})

    def state_dict(self) -> dict[str, Any]:
        budgets = {"skips": self._skips, "rollbacks": self._rollbacks}
        return {"norms": self._norms.state(), "losses": self._losses.state(), **budgets}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the last step of a checkpoint. Budgets that this process used stay used."""
        self._forget()
        self._norms.load(state.get("norms", []))
        self._losses.load(state.get("losses", []))
        self._skips = sorted({*self._skips, *state.get("skips", [])})
        self._rollbacks = max(self._rollbacks, state.get("rollbacks", 0))
