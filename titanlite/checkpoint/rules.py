"""Rules between a run and the checkpoint that it loads: steps, batches, tensors, and the model's
fields.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from math import gcd
from typing import Any

from titanlite.config.layout import Batch
from titanlite.config.schema import Training
from titanlite.errors import UserError, nearest, some_of
from titanlite.registry import ModelSpec
from titanlite.runtime.bucket import Place

_FIELD = "model.overrides."
DATA = "data"
"""Stands for the position in the data in checkpoint.exclude_from_loading."""


def excluded(name: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern matches a name or a prefix of it; "optimizer" means all optimizer state."""
    return any(fnmatchcase(name, pattern) or name.startswith(f"{pattern}.") for pattern in patterns)


def check_exclude_patterns(patterns: Sequence[str], names: set[str]) -> None:
    """Raise for a pattern that matches nothing."""
    for pattern in patterns:
        if not any(excluded(name, [pattern]) for name in names):
            close = nearest(pattern, names)
            more = " alone"
            if DATA in names:
                more = f', optimizer.NAME.KEY and "{DATA}"'
            hint = f"did you mean {close}?" if close else f"there is model.NAME{more}"
            raise UserError(f'checkpoint.exclude_from_loading: "{pattern}" matches nothing; {hint}')


def check_model(
    source: object, saved: Mapping[str, Any], spec: ModelSpec, model: Any, exclude: Sequence[str]
) -> list[str]:
    """Refuse weights of a model with other fields, since tensor shapes reveal only some of them.

    Return the patterns for tensors: `exclude` without those that match a field,
    model.overrides.NAME."""
    ours = {f"{_FIELD}{name}": json.dumps(value) for name, value in asdict(model).items()}
    theirs = {f"{_FIELD}{name}": json.dumps(value) for name, value in saved.items()}
    differences = []
    for key, value in ours.items():
        is_checked = key.removeprefix(_FIELD) not in spec.unchecked_fields
        if is_checked and theirs.get(key, value) != value and not excluded(key, exclude):
            differences.append(f"{key}: {theirs[key]} in the checkpoint, {value} in this run")
    if differences:
        raise UserError(
            f"{source} has the weights of a {spec.name} with other fields; nothing was loaded. "
            "To start over, give another job.dump_folder; to continue from these weights, list "
            f"the fields in checkpoint.exclude_from_loading:{some_of(differences)}"
        )
    found = list[str]()
    for pattern in exclude:
        if not (pattern.startswith(_FIELD) and any(excluded(key, [pattern]) for key in ours)):
            found.append(pattern)
    return found


def differences(
    saved: Mapping[str, str], wanted: Mapping[str, str], names: set[str]
) -> Iterator[str]:
    """Yield the differences between the tensors of a checkpoint and of a run."""
    for name in sorted(names):
        if name not in saved:
            yield f"{name}: not in the checkpoint"
        elif name not in wanted:
            yield f"{name}: only in the checkpoint"
        elif _comparable(name, saved[name]) != _comparable(name, wanted[name]):
            yield f"{name}: {saved[name]} in the checkpoint, {wanted[name]} in this run"


def _comparable(name: str, description: str) -> str:
    """Return a description without optimizer.state_dtype, which may differ: loading casts."""
    if name.startswith("optimizer."):
        return description.replace("bfloat16", "float32")
    return description


def batch_changes(
    saved: Mapping[str, Any], mesh: Mapping[str, int], training: Training, batch: Batch
) -> Iterator[str]:
    """Yield how a global batch that depends on the number of ranks changed, and how to keep it."""
    before = saved["global_batch_size"]
    ranks = batch.data_parallel
    if before == -1:
        before = saved["local_batch_size"] * mesh["dp_replicate"] * mesh["dp_shard"]
    if training.global_batch_size != -1 or before == batch.total:
        return
    keep = f"{ranks} data-parallel ranks cannot share {before}"
    if before % ranks == 0:
        keep = f"to keep it: --training.global_batch_size {before}"
        local = gcd(batch.local, before // ranks)
        if local != batch.local:
            keep += f" --training.local_batch_size {local}"
    yield (
        f"the global batch (training.global_batch_size = -1) is {batch.total} sequences, "
        f"and was {before}; {keep}"
    )


def require_step(root: Place, step: int, steps: Sequence[int]) -> None:
    """Raise unless the step of checkpoint.load_step is among those in its folder."""
    if step not in steps:
        existing = "there are none"
        if steps:
            existing = f"there are: {', '.join(map(str, steps))}"
        raise UserError(f"checkpoint.load_step = {step}: no such checkpoint in {root}; {existing}")
