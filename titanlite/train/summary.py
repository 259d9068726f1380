"""The lines that a run prints at its start: every number that the config implies."""

from collections import Counter

import torch
import torch.distributed as dist

from titanlite.checkpoint.manifest import CONFIG, read_document
from titanlite.checkpoint.resume import Resume
from titanlite.config.pipeline_order import headline
from titanlite.config.schema import KEYS, JobConfig, config_of
from titanlite.config.section import value_of
from titanlite.config.toml import flatten, toml_value, tomllib
from titanlite.errors import counted, format_bytes
from titanlite.observe.run_folder import versions
from titanlite.optim import optimizer_bytes, optimizer_title, trained_parameters
from titanlite.optim.lr_schedule import learning_rate
from titanlite.parallel.dtensor import local_part
from titanlite.runtime.distributed import gather_objects
from titanlite.train.trainer import Trainer

_OF_RATES = ("optimizer.lr", "training.steps")
_ROLE_NAMES = {"column": "matrices", "row": "matrices", "replicated": "other", "expert": "experts"}


def describe_start(trainer: Trainer) -> list[str]:
    """Return the lines: numbers of the whole model, and memory of the rank that needs most.

    Call it on all ranks.
    """
    job = trainer.job
    config = trainer.job.config
    training = config.training
    rows = {}
    if config.job.description:
        rows["run"] = config.job.description
    installed = versions()
    python = installed["python"]
    rows["titanlite"] = f"{installed['titanlite']}, torch {torch.__version__}, Python {python}"
    rows["model"] = _describe_model(trainer)
    rows["device"] = _describe_device(trainer)
    rows["mesh"] = str(job.layout)
    if job.layout.pp > 1:
        rows["pipeline"] = headline(job.stages)
    rows["batch"] = _describe_batch(trainer)
    rows["data"] = _describe_data(trainer)
    if config.validation.enable:
        rows["validation"] = _describe_validation(trainer)
    rows["compute"] = (
        f"{trainer.report.flops_per_token:,} FLOPs per token, "
        f"{training.mixed_precision_param} (parameters {training.dtype}, "
        f"reduction {training.mixed_precision_reduce})"
    )
    rows["memory"] = _describe_memory(trainer)
    rows["optimizer"] = _describe_optimizer(trainer)
    rows["seed"] = f"{trainer.seed}"
    if config.debug.deterministic:
        rows["seed"] += ", deterministic algorithms"
    lines = [f"{name:<10} {text}" for name, text in rows.items()]
    changes = [*job.remarks, _dear_validation(trainer), _rate_change(trainer.resume, config)]
    if config.compile.enable:
        changes.append("compiling in the first step, which may take minutes")
    return [*lines, *trainer.notes, *filter(None, changes)]


def _describe_optimizer(trainer: Trainer) -> str:
    job = trainer.job
    settings = job.config.optimizer
    table = trainer.report.context.table
    whole = trained_parameters([trainer.model], table, job.spec.blocks, settings.no_decay)
    decayed = sum(item.decays for item in whole)
    decay = f"weight decay {settings.weight_decay:g} on {decayed} tensors"
    return f"{optimizer_title(job.config)}, {decay}, none on {len(whole) - decayed}"


def _describe_memory(trainer: Trainer) -> str:
    """Return the memory for model and optimizer on the rank that needs most."""
    config = trainer.job.config
    parameters = []
    for part in trainer.parts:
        parameters.extend(part.parameters())
    sizes = [local_part(p).numel() * p.element_size() for p in parameters]
    gradients = sum(size for size, p in zip(sizes, parameters, strict=True) if p.requires_grad)
    own = sum(sizes), gradients, optimizer_bytes(trainer.runner.trained, config)
    most = max(gather_objects(own, dist.group.WORLD), key=sum)
    where = "per rank"
    if config.training.enable_cpu_offload:
        where = "per rank, in host memory"
    shown = "parameters {} + gradients {} + optimizer {}".format(*map(format_bytes, most))
    if config.optimizer.state_on != "device":
        shown += f", this on the {config.optimizer.state_on}"
    return f"{where}: {shown}"


def _rate_change(resume: Resume, config: JobConfig) -> str:
    """Return a line about a learning rate that changes more than twofold where a run resumes."""
    if resume.foreign or not (resume.continues and resume.folder):
        return ""
    keys = [key for key in KEYS if key.startswith((*_OF_RATES, "lr_scheduler."))]
    saved = flatten(tomllib.loads(read_document(resume.folder, CONFIG).decode()))
    before = config_of({key: saved[key] for key in keys if key in saved})
    changed = []
    for key in keys:
        old = value_of(before, key)
        new = value_of(config, key)
        if old != new:
            changed.append(f"{key} {toml_value(old)} -> {toml_value(new)}")
    step = resume.position.step
    last = learning_rate(before, step)
    following = learning_rate(config, step + 1)
    if not changed or max(last, following) <= 2 * min(last, following):
        return ""
    why = ", ".join(changed)
    return f"learning rate: {last:.3g} in step {step}, {following:.3g} in step {step + 1} ({why})"


def _describe_model(trainer: Trainer) -> str:
    roles: Counter[str] = Counter()
    active = 0
    for name, parameter in trainer.model.named_parameters():
        rule = trainer.report.context.table[name]
        roles[_ROLE_NAMES.get(rule.tensor, rule.tensor)] += parameter.numel()
        active += round(parameter.numel() * rule.active)
    frozen = sum(p.numel() for p in trainer.model.parameters() if not p.requires_grad)
    model = trainer.job.config.model
    counts = [f"{model.name} {model.flavor}", f"{roles.total():,} parameters"]
    if active < roles.total():
        counts.append(f"{active:,} active")
    if frozen:
        counts.append(f"{frozen:,} frozen")
    of_roles = ", ".join(f"{role} {count:,}" for role, count in roles.items())
    return f"{', '.join(counts)}: {of_roles}"


def _describe_batch(trainer: Trainer) -> str:
    job = trainer.job
    batch = job.batch
    training = job.config.training
    tokens = batch.total * training.seq_len
    in_all = trainer.tokens + tokens * (training.steps - trainer.step)
    text = (
        f"{batch.total:,} = local {batch.local:,} x data-parallel {batch.data_parallel:,} "
        f"x accumulation {batch.accumulation:,}; {tokens:,} tokens a step, "
        f"{in_all:,} in all"
    )
    as_data_parallel = batch.local * job.layout.world
    if training.global_batch_size == -1 and batch.total < as_data_parallel:
        text += f" (with data parallelism instead, these ranks would take {as_data_parallel:,})"
    return text


def _describe_data(trainer: Trainer) -> str:
    data = trainer.data.training
    training = trainer.job.config.training
    mixture = " + ".join(
        f"{part.weight:g} {part.dataset_path or part.dataset}" for part in training.mixture
    )
    windows = "streamed, windows"
    if data.samples is not None:
        windows = counted(data.samples, "window")
    parts = [mixture or training.dataset, f"{windows} of {training.seq_len:,} tokens"]
    if data.samples is not None and not mixture:
        steps = round(data.samples / trainer.job.batch.total)
        per_epoch = "less than a step"
        if steps:
            per_epoch = counted(steps, "step")
        parts.append(f"{per_epoch} an epoch")
    return ", ".join([*parts, f"fingerprint {data.fingerprint}"])


def _describe_validation(trainer: Trainer) -> str:
    cost = trainer.report.validation
    job = trainer.job
    freq = min(job.config.validation.freq, job.config.training.steps)
    every = "after each step"
    if freq > 1:
        every = f"every {freq:,} steps"
    size = f"{cost.windows:,} windows of {job.validation_seq_len:,} tokens"
    share = f"about {cost.steps / (cost.steps + freq):.0%} of the work"
    return f"{size} in {cost.batches:,} batches a rank, {every}, {share}"


def _dear_validation(trainer: Trainer) -> str:
    cost = trainer.report.validation
    if cost.tokens <= cost.between:
        return ""
    return (
        f"one validation has {cost.tokens:,} tokens, the training between two {cost.between:,}: "
        "set validation.steps to fewer batches, or raise validation.freq"
    )


def _describe_device(trainer: Trainer) -> str:
    world = trainer.job.layout.world
    device = trainer.runner.context.device
    threads = torch.get_num_threads()
    hosts = len(set(gather_objects(trainer.rank_info.host, dist.group.WORLD)))
    ranks = f"{counted(world, 'rank')} on {counted(hosts, 'host')}"
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, {ranks}, NCCL"
    return f"CPU, {ranks}, {counted(threads, 'thread')} each, gloo"
