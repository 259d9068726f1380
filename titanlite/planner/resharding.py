"""What parallelism.fsdp_reshard_after_forward "auto" stands for on a GPU."""

from dataclasses import replace

from titanlite.config.job import Job
from titanlite.config.resharding import RESHARD
from titanlite.config.schema import with_values
from titanlite.errors import format_bytes
from titanlite.planner.depth import fullest, plan_ranks
from titanlite.planner.hardware import Hardware


def choose(job: Job, hardware: Hardware) -> tuple[str, str]:
    """Return "never" if a step that keeps gathered parameters fits the GPU, otherwise "default",
    and the reason.
    """
    return verdict(fullest(plan_ranks(kept_gathered(job))).peak, hardware)


def kept_gathered(job: Job) -> Job:
    return replace(job, config=with_values(job.config, {RESHARD: "never"}))


def verdict(peak: int, hardware: Hardware) -> tuple[str, str]:
    """Do what `choose` does, by the peak of a step that keeps gathered parameters."""
    usable = f"{format_bytes(hardware.usable_bytes)} of a GPU ({hardware.name}) are usable"
    why = f'a step with "never" needs {format_bytes(peak)} a rank'
    if peak > hardware.usable_bytes:
        return "default", f"{why}, and only {usable}"
    return "never", f"{why}, and {usable}"
