"""The plan of a step, as one rank's totals, and a GPU to plan for."""

from __future__ import annotations

from typing import Any

from titanlite.config.job import Job
from titanlite.planner.depth import fullest, plan_ranks
from titanlite.planner.hardware import load_hardware
from titanlite.planner.record import Totals

H100 = load_hardware("h100-80g")


def plan_step(job: Job, imbalance: float = 1) -> Totals:
    """Return a step of a job, on its fullest rank."""
    return fullest(plan_ranks(job, imbalance=imbalance))


def summed(totals: Totals) -> tuple[Any, ...]:
    """Return all that a plan tells of a rank."""
    needed = totals.peak, totals.moment, totals.at_peak, totals.static
    return *needed, totals.flops, totals.moved, totals.number, totals.sent
