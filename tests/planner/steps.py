"""The plan of a step, as one recording."""

from __future__ import annotations

from titanlite.config.job import Job
from titanlite.planner.depth import fullest, plan_ranks
from titanlite.planner.record import Recording


def plan_step(job: Job, imbalance: float = 1) -> Recording:
    """Return a step of a job, on its fullest rank."""
    return fullest(plan_ranks(job, imbalance=imbalance))
