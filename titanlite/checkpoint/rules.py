"""Rules between a run and the checkpoint that it loads: steps, batches, tensors, and the
fields of the model.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from math import gcd
from pathlib import Path
from typing import Any

from titanlite.config.layout import Batch
from titanlite.config.schema import Training
from titanlite.errors import UserError, nearest, some_of
from titanlite.registry import ModelSpec

_FIELD = "model.overrides."
DATA = "data"
"""Stands for the position in the data in checkpoint.exclude_from_loading."""


def excluded(name: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern matches a name or a prefix of it: "optimizer" means all of the optimizer's
    state.
    """
    return any(fnmatchcase(name, pattern) or name.startswith(f"{pattern}.") for pattern in patterns)


def check_exclude_patterns(patterns: Sequence[str], names: set[str]) -> None:
    """Raise for a pattern that matches nothing."""
    for pattern in patterns:
        if not any(excluded(name, [pattern]) for name in names):
            close = nearest(pattern, names)
            more = f', optimizer.NAME.KEY and "{DATA}"' if DATA in names else " alone"
            hint = f"did you mean {close}?" if close else f"there is model.NAME{more}"
            raise UserError(f'checkpoint.exclude_from_loading: "{pattern}" matches nothing; {hint}')


def check_model(
    source: object, saved: Mapping[str, Any], spec: ModelSpec, model: Any, exclude: Sequence[str]
) -> list[str]:
    """Refuse weights of a model with other fields than these: the tensors' shapes show only some of
    them.

    Return the patterns that stand for tensors: `exclude` without those that match a field,
    model.overrides.NAME."""
    ours = {f"{_FIELD}{name}": json.dumps(value) for name, value in asdict(model).items()}
    theirs = {f"{_FIELD}{name}": json.dumps(value) for name, value in saved.items()}
    differences = [
        f"{key}: {theirs[key]} in the checkpoint, {value} in this run"
        for key, value in ours.items()
        if theirs.get(key, value) != value
        and key.removeprefix(_FIELD) not in spec.unchecked_fields
        and not excluded(key, exclude)
    ]
    if differences:
        raise UserError(
            f"{source} has the weights of a {spec.name} with other fields; nothing was loaded. "
            "To train anew, give another job.dump_folder; to go on from these weights, list "
            f"the fields in checkpoint.exclude_from_loading:{some_of(differences)}"
        )
    return [
        pattern
        for pattern in exclude
        if not (pattern.startswith(_FIELD) and any(excluded(key, [pattern]) for key in ours))
    ]


def differences(
    saved: Mapping[str, str], wanted: Mapping[str, str], names: set[str]
) -> Iterator[str]:
    """Yield how the tensors of a checkpoint differ from those of a run."""
    for name in sorted(names):
        if name not in saved:
            yield f"{name}: not in the checkpoint"
        elif name not in wanted:
            yield f"{name}: only in the checkpoint"
        elif _comparable(name, saved[name]) != _comparable(name, wanted[name]):
            yield f"{name}: {saved[name]} in the checkpoint, {wanted[name]} in this run"


def _comparable(name: str, description: str) -> str:
    """optimizer.state_dtype may differ: loading casts."""
    return (
        description.replace("bfloat16", "float32") if name.startswith("optimizer.") else description
    )


def batch_changes(
    saved: Mapping[str, Any], mesh: Mapping[str, int], training: Training, batch: Batch
) -> Iterator[str]:
    """Yield how a global batch that follows from the number of ranks changed, and how to keep
    it.
    """
    before = saved["global_batch_size"]
    ranks = batch.data_parallel
    if before == -1:
        before = saved["local_batch_size"] * mesh["dp_replicate"] * mesh["dp_shard"]
    if training.global_batch_size != -1 or before == batch.total:
        return
    local = gcd(batch.local, before // ranks)
    keys = f"--training.global_batch_size {before}" + f" --training.local_batch_size {local}" * (
        local != batch.local
    )
    keep = (
        f"to keep it: {keys}"
        if before % ranks == 0
        else f"{ranks} data-parallel ranks cannot share {before}"
    )
    yield (
        f"the global batch (training.global_batch_size = -1) is {batch.total} sequences, "
        f"and was {before}; {keep}"
    )


def require_step(root: Path, step: int, steps: Sequence[int]) -> None:
    """Raise unless the step of checkpoint.load_step is among those in its folder."""
    if step not in steps:
        existing = f"there are: {', '.join(map(str, steps))}" if steps else "there are none"
        raise UserError(f"checkpoint.load_step = {step}: no such checkpoint in {root}; {existing}")
