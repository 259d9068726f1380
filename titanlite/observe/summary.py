"""The lines that a run prints at its start: every number that the config implies."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from titanlite import __version__
from titanlite.config.job import Job
from titanlite.errors import format_bytes
from titanlite.observe.memory import state_bytes
from titanlite.registry import Rule

_ROLE_NAMES = {"column": "matrices", "row": "matrices", "replicated": "other"}


@dataclass(frozen=True)
class StartFacts:
    """What the lines say beside the config and the model."""

    device: torch.device
    hosts: list[str]  # of all ranks
    seed: int
    samples: int | None  # None: streamed
    fingerprint: str
    flops_per_token: int
    decayed_tensors: int
    exempt_tensors: int
    optimizer_bytes: int
    optimizer_implementation: str


def describe_start(
    job: Job, model: nn.Module, parts: Sequence[nn.Module], table: dict[str, Rule], facts: StartFacts
) -> list[str]:
    """Return the lines for the console: numbers of the whole `model`, memory of this rank's `parts`."""
    config, batch, training = job.config, job.batch, job.config.training
    roles: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        role = table[name].tensor
        roles[_ROLE_NAMES.get(role, role)] += parameter.numel()
    total = sum(roles.values())
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    parameters = [p for part in parts for p in part.parameters()]
    local = [(p.to_local() if isinstance(p, DTensor) else p).numel() for p in parameters]
    local_trained = sum(count for count, p in zip(local, parameters, strict=True) if p.requires_grad)
    state = state_bytes(sum(local), local_trained, parameters[0].element_size(), facts.optimizer_bytes)
    data_sets = " + ".join(f"{part.weight:g} {part.dataset}" for part in training.mixture) or training.dataset
    tokens = batch.total * training.seq_len
    rows = {
        "titanlite": f"{__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        "model": f"{config.model.name} {config.model.flavor}, {total:,} parameters"
        + (f", {frozen:,} frozen: " if frozen else ": ")
        + ", ".join(f"{role} {count:,}" for role, count in roles.items()),
        "device": _describe_device(facts, job.layout.world),
        "mesh": str(job.layout),
        "batch": f"{batch.total} = local {batch.local} x data-parallel {batch.data_parallel} x accumulation "
        f"{batch.accumulation}; {tokens:,} tokens a step, {tokens * training.steps:,} in all",
        "data": f"{data_sets}, "
        + ("streamed, " if facts.samples is None else f"{facts.samples:,} ")
        + f"windows of {training.seq_len} tokens, "
        + ("" if facts.samples is None else f"{facts.samples / batch.total:,.0f} steps an epoch, ")
        + f"fingerprint {facts.fingerprint}",
        "compute": f"{facts.flops_per_token:,} FLOPs per token, {training.mixed_precision_param} "
        f"(parameters {training.dtype}, reduction {training.mixed_precision_reduce})",
        "memory": ("per rank, in host memory: " if training.enable_cpu_offload else "per rank: ")
        + "parameters {} + gradients {} + optimizer {}".format(*map(format_bytes, state)),
        "optimizer": f"{config.optimizer.name} ({facts.optimizer_implementation}), weight decay "
        f"{config.optimizer.weight_decay:g} on {facts.decayed_tensors} tensors, none on {facts.exempt_tensors}",
        "seed": f"{facts.seed}" + (", deterministic algorithms" if config.debug.deterministic else ""),
    }
    if config.job.description:
        rows = {"run": config.job.description, **rows}
    lines = [f"{name:<10} {text}" for name, text in rows.items()]
    return [*lines, job.no_effect] if job.no_effect else lines


def _describe_device(facts: StartFacts, world: int) -> str:
    hosts, threads = len(set(facts.hosts)), torch.get_num_threads()
    ranks = f"{world} rank{'s' * (world > 1)} on {hosts} host{'s' * (hosts > 1)}"
    if facts.device.type == "cuda":
        return f"{torch.cuda.get_device_name(facts.device)}, {ranks}, NCCL"
    return f"CPU, {ranks}, {threads} thread{'s' * (threads > 1)} each, gloo"
