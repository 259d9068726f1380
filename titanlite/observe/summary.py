"""What a run says of itself at the start: every number that the config implies."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from titanlite import __version__
from titanlite.config.job import Job
from titanlite.errors import format_bytes
from titanlite.observe.memory import state_bytes
from titanlite.registry import Rule

_ROLE_NAMES = {"embedding": "embedding", "column": "matrices", "row": "matrices", "replicated": "other"}


def describe_start(
    job: Job,
    model: nn.Module,
    parts: Sequence[nn.Module],
    table: dict[str, Rule],
    *,
    device: torch.device,
    hosts: list[str],
    seed: int,
    samples: int | None,
    fingerprint: str,
    flops: int,
    decayed: int,
    exempt: int,
    optimizer_bytes: int,
    implementation: str,
) -> list[str]:
    """Lines for the console."""
    config, batch, layout = job.config, job.batch, job.layout
    whole = list(model.parameters())
    total, trained = _elements(whole), _elements([p for p in whole if p.requires_grad])
    parameters = [parameter for part in parts for parameter in part.parameters()]
    roles: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        role = table[name].tensor
        roles[_ROLE_NAMES.get(role, role)] += parameter.numel()
    frozen = f", {total - trained:,} frozen" if trained < total else ""
    tokens = batch.total * config.training.seq_len
    held = (
        _elements(parameters, local=True),
        _elements([p for p in parameters if p.requires_grad], local=True),
    )
    bytes_each = state_bytes(*held, parameters[0].element_size(), optimizer_bytes)
    rows = {
        "titanlite": f"{__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        "model": f"{config.model.name} {config.model.flavor}, {total:,} parameters{frozen}: "
        + ", ".join(f"{role} {count:,}" for role, count in roles.items()),
        "device": _describe_device(device, layout.world, hosts),
        "mesh": str(layout),
        "batch": f"{batch.total} = local {batch.local} x data-parallel {batch.data_parallel} x accumulation "
        f"{batch.accumulation}; {tokens:,} tokens a step, {tokens * config.training.steps:,} in all",
        "data": f"{_data_names(job)}, "
        + ("streamed, " if samples is None else f"{samples:,} ")
        + f"windows of {config.training.seq_len} tokens, "
        + ("" if samples is None else f"{samples / batch.total:,.0f} steps an epoch, ")
        + f"fingerprint {fingerprint}",
        "compute": f"{flops:,} FLOPs per token, {config.training.mixed_precision_param} "
        f"(parameters {config.training.dtype}, reduction {config.training.mixed_precision_reduce})",
        "memory": ("per rank, in host memory: " if config.training.enable_cpu_offload else "per rank: ")
        + " + ".join(f"{what} {format_bytes(size)}" for what, size in zip(_STATE, bytes_each, strict=True)),
        "optimizer": f"{config.optimizer.name} ({implementation}), weight decay "
        f"{config.optimizer.weight_decay:g} on {decayed} tensors, none on {exempt}",
        "seed": f"{seed}" + (", deterministic algorithms" if config.debug.deterministic else ""),
    }
    if config.job.description:
        rows = {"run": config.job.description, **rows}
    lines = [f"{name:<10} {text}" for name, text in rows.items()]
    return [*lines, job.no_effect] if job.no_effect else lines


def _data_names(job: Job) -> str:
    parts = job.config.training.mixture
    return " + ".join(f"{part.weight:g} {part.dataset}" for part in parts) or job.config.training.dataset


_STATE = ("parameters", "gradients", "optimizer")


def _elements(parameters: list[nn.Parameter], local: bool = False) -> int:
    return sum((p.to_local() if local and isinstance(p, DTensor) else p).numel() for p in parameters)


def _describe_device(device: torch.device, world: int, hosts: list[str]) -> str:
    ranks = f"{world} rank" + "s" * (world > 1) + f" on {len(set(hosts))} host" + "s" * (len(set(hosts)) > 1)
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, {ranks}, NCCL"
    return f"CPU, {ranks}, {torch.get_num_threads()} thread{'s' * (torch.get_num_threads() > 1)} each, gloo"
