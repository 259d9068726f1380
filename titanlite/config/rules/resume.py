"""Checks between the config and the checkpoint that a run resumes."""

from collections.abc import Iterator, Mapping, Sequence
from math import gcd
from pathlib import Path
from typing import Any

from titanlite.config.schema import Training
from titanlite.errors import UserError
from titanlite.layout import Batch


def batch_changes(
    saved: Mapping[str, Any], mesh: Mapping[str, int], training: Training, batch: Batch
) -> Iterator[str]:
    """Yield how a global batch that follows from the number of ranks changed, and how to keep it."""
    before, ranks = saved["global_batch_size"], batch.data_parallel
    if before == -1:
        before = saved["local_batch_size"] * mesh["dp_replicate"] * mesh["dp_shard"]
    if training.global_batch_size != -1 or before == batch.total:
        return
    local = gcd(batch.local, before // ranks)
    keys = f"--training.global_batch_size {before}" + f" --training.local_batch_size {local}" * (local != batch.local)
    keep = f"to keep it: {keys}" if before % ranks == 0 else f"{ranks} data-parallel ranks cannot share {before}"
    yield f"the global batch (training.global_batch_size = -1) is {batch.total} sequences, and was {before}; {keep}"


def require_step(root: Path, step: int, steps: Sequence[int]) -> None:
    """Raise unless the step of checkpoint.load_step is among those in its folder."""
    if step not in steps:
        existing = f"there are: {', '.join(map(str, steps))}" if steps else "there are none"
        raise UserError(f"checkpoint.load_step = {step}: no such checkpoint in {root}; {existing}")
