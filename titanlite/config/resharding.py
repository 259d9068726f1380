"""parallelism.fsdp_reshard_after_forward "auto", which is resolved for each start.

Imports no torch.
"""

from titanlite.config.job import Job

RESHARD = "parallelism.fsdp_reshard_after_forward"


def is_to_choose(job: Job) -> bool:
    """Return whether the key is "auto", and what it stands for has an effect."""
    return job.given.parallelism.fsdp_reshard_after_forward == "auto" and RESHARD not in job.idle


def describe_choice(value: str, why: str) -> str:
    """Return the line that says what "auto" stands for."""
    return f'{RESHARD} "auto" is "{value}": {why}'
