"""What a resumed run does otherwise than the one that was saved: some of it is refused, the rest is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn

from titanlite.checkpoint.load import DATA, Source, excluded
from titanlite.checkpoint.manifest import CONFIG, ENVIRONMENT
from titanlite.config.job import Job
from titanlite.config.toml import to_toml, tomllib
from titanlite.errors import UserError

_NO_NEWS = ("job.", "checkpoint.", "metrics.", "profiling.", "comm.", "generate.")


def check_data(source: Source, job: Job, seed: int, fingerprint: str) -> None:
    """Refuse to go on in other data, or in another order of it."""
    if excluded(DATA, job.config.checkpoint.exclude_from_loading):
        return
    saved = source.position
    begin_anew = f'or begin it anew with checkpoint.exclude_from_loading = ["{DATA}"]'
    if saved.fingerprint != fingerprint:
        raise UserError(
            f"the data of [training] has the fingerprint {fingerprint}, and {source.folder} was trained on "
            f"{saved.fingerprint}: give the same data, {begin_anew}"
        )
    if saved.seed != seed:
        raise UserError(
            f"debug.seed = {seed}, and {source.folder} was trained with {saved.seed}, which orders the data: leave "
            f"the key out, {begin_anew}"
        )


def changes(source: Source, job: Job, model: nn.Module) -> list[str]:
    """Lines for the log."""
    old, new = _settings(_read(source.folder)), _settings(to_toml(job.given))
    differ = [
        f"{key} {_shown(old, key)} -> {_shown(new, key)}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and not key.startswith(_NO_NEWS)
    ]
    lines = [f"changed since step {source.position.step}, the config rules: {', '.join(differ)}"] if differ else []
    mesh = json.loads((source.folder / ENVIRONMENT).read_text(encoding="utf-8"))["mesh"]
    here = dict(zip(mesh, job.layout.degrees, strict=True))
    batch = ("training.local_batch_size", "training.global_batch_size")
    drops = any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())
    if drops and (mesh != here or any(old.get(key) != new.get(key) for key in batch)):
        lines.append(
            "dropout masks differ from here on: they follow the mesh and the batch, which are not as they were"
        )
    return lines


def _read(folder: Path) -> str:
    return (folder / CONFIG).read_text(encoding="utf-8")


def _settings(text: str) -> dict[str, Any]:
    """Values by dotted key."""
    found: dict[str, Any] = {}

    def walk(table: dict[str, Any], prefix: str) -> None:
        for name, value in table.items():
            if isinstance(value, dict):
                walk(value, f"{prefix}{name}.")
            else:
                found[prefix + name] = value

    walk(tomllib.loads(text), "")
    return found


def _shown(settings: dict[str, Any], key: str) -> str:
    return json.dumps(settings[key]) if key in settings else "none"
