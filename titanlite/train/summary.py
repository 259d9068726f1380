"""The lines that a run prints at its start: every number that the config implies."""

import platform
from collections import Counter

import torch
import torch.distributed as dist

from titanlite import __version__
from titanlite.config.pipeline_order import headline
from titanlite.errors import format_bytes
from titanlite.optim import implementation, optimizer_bytes, trained_parameters
from titanlite.parallel.dtensor import local_part
from titanlite.parallel.pipeline_parallel import orders
from titanlite.registry import get_optimizer
from titanlite.runtime.distributed import gather_objects
from titanlite.train.trainer import Trainer

_ROLE_NAMES = {"column": "matrices", "row": "matrices", "replicated": "other", "expert": "experts"}


def describe_start(trainer: Trainer) -> list[str]:
    """Return the lines: numbers of the whole model, memory of the rank that needs most.

    Call it on all ranks.
    """
    job, data, config = trainer.job, trainer.data, trainer.job.config
    batch, training, optimizer = job.batch, config.training, config.optimizer
    roles: Counter[str] = Counter()
    active = 0
    for name, parameter in trainer.model.named_parameters():
        rule = trainer.report.context.table[name]
        roles[_ROLE_NAMES.get(rule.tensor, rule.tensor)] += parameter.numel()
        active += round(parameter.numel() * rule.active)
    frozen = sum(p.numel() for p in trainer.model.parameters() if not p.requires_grad)
    parameters = [p for part in trainer.parts for p in part.parameters()]
    sizes = [local_part(p).numel() * p.element_size() for p in parameters]
    gradients = sum(size for size, p in zip(sizes, parameters, strict=True) if p.requires_grad)
    own_state = sum(sizes), gradients, optimizer_bytes(trainer.trained, config)
    state = max(gather_objects(own_state, dist.group.WORLD), key=sum)
    unused = get_optimizer(optimizer.name, config.model.package).unused
    how = "" if "implementation" in unused else f" ({implementation(optimizer)})"
    whole = trained_parameters(
        [trainer.model], trainer.report.context.table, job.spec.blocks, optimizer.no_decay
    )
    decayed = sum(item.decays for item in whole)
    data_sets = (
        " + ".join(f"{part.weight:g} {part.dataset}" for part in training.mixture)
        or training.dataset
    )
    tokens = batch.total * training.seq_len
    rows = {
        "titanlite": f"{__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        "model": f"{config.model.name} {config.model.flavor}, {roles.total():,} parameters"
        + f", {active:,} active" * (active < roles.total())
        + (f", {frozen:,} frozen: " if frozen else ": ")
        + ", ".join(f"{role} {count:,}" for role, count in roles.items()),
        "device": _describe_device(trainer),
        "mesh": str(job.layout),
        **({"pipeline": headline(job.stages, orders(job.stages))} if job.layout.pp > 1 else {}),
        "batch": f"{batch.total:,} = local {batch.local:,} x data-parallel {batch.data_parallel:,} x accumulation "
        f"{batch.accumulation:,}; {tokens:,} tokens a step, {tokens * training.steps:,} in all"
        + f"; as data parallel, these ranks would take {batch.local * job.layout.world:,}"
        * (training.global_batch_size == -1 and batch.total < batch.local * job.layout.world),
        "data": f"{data_sets}, "
        + ("streamed, " if data.samples is None else f"{data.samples:,} ")
        + f"windows of {training.seq_len:,} tokens, "
        + (
            ""
            if data.samples is None or training.mixture
            else f"{data.samples / batch.total:,.0f} steps an epoch, "
        )
        + f"fingerprint {data.fingerprint}",
        "compute": f"{trainer.report.flops_per_token:,} FLOPs per token, {training.mixed_precision_param} "
        f"(parameters {training.dtype}, reduction {training.mixed_precision_reduce})",
        "memory": ("per rank, in host memory: " if training.enable_cpu_offload else "per rank: ")
        + "parameters {} + gradients {} + optimizer {}".format(*map(format_bytes, state)),
        "optimizer": f"{optimizer.name}{how}, weight decay {optimizer.weight_decay:g} "
        f"on {decayed} tensors, none on {len(whole) - decayed}",
        "seed": f"{trainer.seed}"
        + (", deterministic algorithms" if config.debug.deterministic else ""),
    }
    if config.job.description:
        rows = {"run": config.job.description, **rows}
    lines = [f"{name:<10} {text}" for name, text in rows.items()]
    compiling = "compiling in the first step, which may take minutes" * config.compile.enable
    return [*lines, *filter(None, (*job.remarks, compiling))]


def _describe_device(trainer: Trainer) -> str:
    world, device, threads = trainer.job.layout.world, trainer.device, torch.get_num_threads()
    hosts = len(set(gather_objects(trainer.rank_info.host, dist.group.WORLD)))
    ranks = f"{world} rank{'s' * (world > 1)} on {hosts} host{'s' * (hosts > 1)}"
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, {ranks}, NCCL"
    return f"CPU, {ranks}, {threads} thread{'s' * (threads > 1)} each, gloo"
