"""`titanlite checkpoint export --format torchtitan` and `--format dcp`."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

from titanlite.checkpoint.manifest import ENVIRONMENT, Manifest, read_document, read_state
from titanlite.checkpoint.torchtitan.names import Names
from titanlite.config.schema import JobConfig
from titanlite.errors import UserError, print_notice
from titanlite.runtime.bucket import Place
from titanlite.runtime.store import LocalPath

if TYPE_CHECKING:
    from titanlite.checkpoint.torchtitan.write import ReadTensor

_RESUMES = (
    "TorchTitan resumes from it with --checkpoint.initial_load_path {} "
    "--checkpoint.no-initial-load-model-only --checkpoint.exclude_from_loading dataloader: "
    "the position in the data is not in it"
)
_OPTIMIZERS = ("AdamW", "Adam")


def export_dcp(
    folder: Place,
    manifest: Manifest,
    target: LocalPath,
    config: JobConfig,
    names: Names,
    read: ReadTensor,
    for_torchtitan: bool,
) -> None:
    """Write a checkpoint in the format of torch's DCP; for TorchTitan, with all that its trainer
    needs to resume.
    """
    from titanlite.checkpoint.commit import staging_folder
    from titanlite.checkpoint.torchtitan.write import write

    if manifest.base:
        raise UserError(f"{folder} has adapters, which TorchTitan lacks; merge them: --format hf")
    state = read_state(folder)
    extras: dict[str, Any] = {}
    if for_torchtitan and manifest.weights_only:
        print_notice(f"{folder} has weights only: TorchTitan can start from it, but not resume")
    elif for_torchtitan:
        extras = _extras(folder, config, state, names)
    with staging_folder(target, None, f"the export to {target}") as staging:
        write(staging.local(), manifest, state["numbers"], names, read, extras)
        target.publish(staging)
    if extras:
        print_notice(_RESUMES.format(target))


def _extras(
    folder: Place, config: JobConfig, state: dict[str, Any], names: Names
) -> dict[str, dict[str, Any]]:
    """Return what TorchTitan's trainer needs to resume besides tensors."""
    import torch
    from torch.optim.lr_scheduler import LambdaLR

    from titanlite.optim.build import adam_options
    from titanlite.optim.lr_schedule import learning_rate

    settings, position = config.optimizer, state["position"]
    if settings.name not in _OPTIMIZERS:
        raise UserError(
            f"{folder}: optimizer.name = {settings.name}, and TorchTitan has "
            f"{' and '.join(_OPTIMIZERS)}; --format dcp writes what there is"
        )
    if settings.no_decay and settings.weight_decay:
        print_notice("TorchTitan decays all parameters: optimizer.no_decay is not exported")
    kind = getattr(torch.optim, settings.name)
    weight = torch.nn.Parameter(torch.zeros(()))
    options = adam_options(settings)
    optimizer = kind([weight], weight_decay=settings.weight_decay, **options)
    schedule = LambdaLR(optimizer, partial(float)).state_dict()
    step = position["step"]
    rate = learning_rate(config, step + 1)
    group = {**optimizer.param_groups[0], "lr": rate, "initial_lr": settings.lr}
    del group["params"]
    trained = dict.fromkeys(name.rpartition(".")[0] for name in state["numbers"])
    keys = [names.theirs(f"model.{name.removeprefix('optimizer.')}") for name in trained]
    groups = {f"param_groups.{key}.{name}": value for key in keys for name, value in group.items()}
    mesh = json.loads(read_document(folder, ENVIRONMENT))["mesh"]
    ranks = mesh["dp_replicate"] * mesh["dp_shard"]
    return {
        "optimizer": groups,
        "lr_scheduler": schedule
        | {"base_lrs": [settings.lr], "_last_lr": [rate]}
        | {"last_epoch": step, "_step_count": step + 1},
        "dataloader": {"world_size": ranks},
        "train_state": {"step": step, "ntokens_seen": position["tokens"] // ranks},
    }
