"""Is this machine fit for the job? Asked by the launcher before any worker exists; every lack is named at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from titanlite.config.job import Job
from titanlite.errors import UserError, format_bytes
from titanlite.runtime import cluster

if TYPE_CHECKING:
    from torch import nn

    from titanlite.registry import Rule


def check_machine(job: Job, device: str, processes: int) -> None:
    """Name everything that this machine lacks for the job, before any worker is started."""
    if faults := list(_lacks(job, device, processes)):
        what = f"{job.config.model.name} {job.config.model.flavor}"
        raise UserError("\n  ".join([f"this machine can't train {what} as asked; nothing was started", *faults]))


def _lacks(job: Job, device: str, processes: int) -> Iterator[str]:
    import torch

    from titanlite.data.sources import validate_dataset
    from titanlite.data.tokenizer import open_tokenizer
    from titanlite.observe.memory import machine_bytes, state_bytes
    from titanlite.observe.metrics import require_wandb
    from titanlite.observe.profiler import require_gpu
    from titanlite.optim import optimizer_bytes, trained_parameters
    from titanlite.parallel import float8, tensor
    from titanlite.parallel.build import build_model
    from titanlite.parallel.convert import build_converters

    config = job.config
    if device == "cuda" and not torch.cuda.is_available():
        why = "torch.cuda.is_available() is false; on the CPU: --job.device cpu"
        yield f"there are GPUs, but torch {torch.__version__} can't use them: {why}"
        return
    if fault := _folder_fault(Path(config.job.dump_folder)):
        yield fault
    if device == "cpu" and config.training.dataloader.pin_memory:
        yield "training.dataloader.pin_memory = true: pinned memory is for copies to a GPU, and there is none"
    if device == "cpu" and config.parallelism.enable_async_tensor_parallel:
        yield "parallelism.enable_async_tensor_parallel = true: it needs GPUs that reach each other's memory"
    training, validation = config.training, config.validation
    data = [("training", part.dataset, part.dataset_path) for part in training.mixture]
    data = data or [("training", training.dataset, training.dataset_path)]
    if validation.enable:
        data.append(("validation", validation.dataset, validation.dataset_path))
    checks: list[Callable[[], object]] = [lambda: open_tokenizer(job)]
    checks += [lambda asked=asked: validate_dataset(*asked, job.shape.vocab_size) for asked in data]
    built: list[tuple[nn.Module, dict[str, Rule]]] = []
    checks.append(lambda: built.append(build_model(job)))
    checks.append(lambda: build_converters(job))
    if config.quantize.linear.float8.enable:
        capability = cluster.gpu_capability() if device == "cuda" else None
        checks.append(lambda: float8.check_device(job, device, capability))
    if config.metrics.enable_wandb:
        checks.append(require_wandb)
    if config.profiling.enable_memory_snapshot:
        checks.append(lambda: require_gpu(device))
    for check in checks:
        try:
            check()
        except UserError as error:
            yield str(error)
    if not built:
        return
    model, table = built[0]
    optimizer = 0
    try:
        found = trained_parameters(model.named_parameters(), table, job.spec.blocks, config.optimizer.no_decay)
        optimizer = optimizer_bytes(found, config)
    except UserError as error:
        yield str(error)
    try:
        tensor.check(model, table, job.layout.tp)
        if config.quantize.linear.float8.enable:
            float8.plan(model, job)
    except UserError as error:
        yield str(error)
    elements = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    size = next(model.parameters()).element_size()
    total = sum(state_bytes(elements, trained, size, optimizer))
    each = total // job.layout.splits
    has = cluster.gpu_bytes() if device == "cuda" else machine_bytes() // processes
    if has is not None and each > has:
        fits = [name for name in job.spec.flavors if _state_of(job, name, size) // job.layout.splits <= has]
        smaller = f"; here: --model.flavor {' or '.join(fits)}" if fits else ""
        yield (
            f"memory: parameters, gradients and optimizer state take {format_bytes(total)} in all, "
            f"{format_bytes(each)} in each of {job.layout.splits} ranks that share them, "
            f"and there are {format_bytes(has)} for each\n"
            f"      what could: {-(-total // has)} or more ranks like these, or {-(-total // (60 << 30))} or more "
            f"GPUs of 80 GB{smaller}"
        )


def _state_of(job: Job, flavor: str, element_size: int) -> int:
    """Bytes that training another flavor of the model keeps."""
    from titanlite.observe.memory import state_bytes
    from titanlite.optim import optimizer_bytes, trained_parameters
    from titanlite.parallel.build import build_meta_model

    model, table = build_meta_model(job.spec, job.spec.configure(flavor, {}))
    elements = sum(p.numel() for p in model.parameters())
    trained = trained_parameters(model.named_parameters(), table, job.spec.blocks, no_decay=())
    return sum(state_bytes(elements, elements, element_size, optimizer_bytes(trained, job.config)))


def _folder_fault(folder: Path) -> str:
    """Why nothing can be written to the dump folder, or an empty string."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    if place.is_dir() and os.access(place, os.W_OK | os.X_OK):
        return ""
    return f'job.dump_folder = "{folder}": {place} is not a folder that can be written to'
