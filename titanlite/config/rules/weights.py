"""Allowed differences between a run and the weights that it loads."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from typing import Any

from titanlite.errors import UserError, some_of
from titanlite.registry import ModelSpec

_FIELD = "model.overrides."


def excluded(name: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern matches a name or a prefix of it: "optimizer" means all of the optimizer's state."""
    return any(fnmatchcase(name, pattern) or name.startswith(f"{pattern}.") for pattern in patterns)


def check_model(
    source: object, saved: Mapping[str, Any], spec: ModelSpec, model: Any, exclude: Sequence[str]
) -> list[str]:
    """Refuse weights of a model with other fields than these: the tensors' shapes show only some of them.

    Return the patterns that stand for tensors: `exclude` without those that match a field, model.overrides.NAME.
    """
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
            f"{source} has weights of another {spec.name}; nothing was loaded. A new run: give another "
            "job.dump_folder. These weights: list what you mean to change in "
            f"checkpoint.exclude_from_loading:{some_of(differences)}"
        )
    return [
        pattern
        for pattern in exclude
        if not (pattern.startswith(_FIELD) and any(excluded(key, [pattern]) for key in ours))
    ]
