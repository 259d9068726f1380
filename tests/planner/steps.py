"""The plan of a step, as one recording, and a GPU to plan for."""

from __future__ import annotations

from titanlite.config.job import Job
from titanlite.planner.depth import fullest, plan_ranks
from titanlite.planner.hardware import load_hardware
from titanlite.planner.record import Operation, Recording

H100 = load_hardware("h100-80g")


def plan_step(job: Job, imbalance: float = 1) -> Recording:
    """Return a step of a job, on its fullest rank."""
    return fullest(plan_ranks(job, imbalance=imbalance))


def computes(phase: str, seconds: float = 1) -> Operation:
    """Return a matrix product that an H100 is estimated to take so long for."""
    rate = H100.peak("bfloat16") * H100.efficiencies["bfloat16"].share
    return Operation(phase, 1, int(seconds * rate), "bfloat16", 1)
