"""Rehearse a training step: the code that trains runs once as one rank of a fake world, on tensors without memory.

Exact, as `titanlite plan --selftest` compares with real processes: the bytes alive and the collectives of the second
step, when the optimizer has its state. Assumed, when a GPU is planned: that what AS_ON_CUDA names is all that a CPU
keeps and a GPU does not. With torch.compile the rehearsal is eager, which allocates at least as much.
"""

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial

from titanlite.config.job import Job
from titanlite.data.loader import MicroBatch
from titanlite.errors import UserError
from titanlite.fault.nonfinite import NonFiniteGuard
from titanlite.models.common import decoder
from titanlite.optim import build_optimizer, optimizer_bytes, trained_parameters
from titanlite.parallel.build import Context, build_model
from titanlite.parallel.dtensor import local_part
from titanlite.parallel.init import allocate
from titanlite.parallel.parallelize import parallelize
from titanlite.planner.counting import Counting
from titanlite.planner.fake_world import fake_world
from titanlite.planner.record import Recording
from titanlite.planner.torch_private import fake_tensor_mode, storage_key, waiting_as_on_a_device
from titanlite.train.loss import count_valid
from titanlite.train.step import StepRunner


def record_step(job: Job, role: str = "first", as_on_cuda: bool = True, middle_once: bool = False) -> Recording:
    """Rehearse a job as it is on its "first" or "last" rank; return what its second step does.

    With `middle_once`, a step runs its first, second and last micro-batch: those between are like the second.
    """
    check_planned(job)
    with _replaced() if as_on_cuda else nullcontext(), skeleton(job, role) as (context, parts), _fake_tensors():
        job, config = context.job, context.job.config
        for part in parts:
            allocate(part, context.device)
        trained = trained_parameters(parts, context.table, job.spec.blocks, config.optimizer.no_decay)
        optimizer = build_optimizer(trained, config)
        rank = dist.get_rank()
        runner = StepRunner(context, parts, [item.parameter for item in trained], optimizer, seed=0, rank=rank)
        return count_second_step(runner, blank_batches(job), middle_once)


@contextmanager
def _fake_tensors() -> Iterator[None]:
    with fake_tensor_mode(), waiting_as_on_a_device():
        yield


def blank_batches(job: Job) -> list[MicroBatch]:
    """Return the micro-batches of a step, of the size that a rank reads."""
    shape = (job.batch.local, 4 if job.config.training.document_mask else 2, job.config.training.seq_len)
    return [MicroBatch(torch.zeros(shape, dtype=torch.int64)) for _ in range(job.batch.accumulation)]


@contextmanager
def skeleton(job: Job, role: str = "first") -> Iterator[tuple[Context, list[nn.Module]]]:
    """Be a rank of a fake world; yield its parts of the model on the meta device, with what changes parameters."""
    update: dict[str, Any] = {"compile": job.config.compile.model_copy(update={"enable": False})}
    update["parallelism"] = job.config.parallelism.model_copy(update={"enable_async_tensor_parallel": False})
    job = replace(job, config=job.config.model_copy(update=update))
    with fake_world(job.layout, 0 if role == "first" else job.layout.world - 1) as mesh:
        model, table = build_model(job)
        context = Context(job, mesh, table, torch.device("cpu"))
        parts, _ = parallelize(model, context)
        yield context, parts


def static_bytes(job: Job) -> dict[str, int]:
    """Return the bytes by kind that the first rank, which has the largest shards, keeps between steps."""
    with skeleton(job) as (context, parts):
        trained = trained_parameters(parts, context.table, job.spec.blocks, no_decay=())
        return {
            "parameters": storage_bytes(parameter for part in parts for parameter in part.parameters()),
            "gradients": storage_bytes(item.parameter for item in trained),
            "optimizer": optimizer_bytes(trained, job.config),
            "buffers": storage_bytes(buffer for part in parts for buffer in part.buffers()),
        }


def is_even(job: Job) -> bool:
    """Return whether every rank has shards of the same shapes."""
    with skeleton(job) as (_, parts):
        parameters = [parameter for part in parts for parameter in part.parameters()]
        return all(
            parameter.numel() == parameter.to_local().numel() * _shards(parameter)
            for parameter in parameters
            if isinstance(parameter, DTensor)
        )


def _shards(tensor: DTensor) -> int:
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return prod(size for size, placement in sizes if not placement.is_replicate())


def count_second_step(
    runner: StepRunner, micro_batches: Sequence[MicroBatch], middle_once: bool = False
) -> Recording:
    """Take two steps, on fake tensors or on real ones; count the second, when the optimizer has its state."""
    context, counting = runner.context, Counting(runner.context.job.layout)
    guard = NonFiniteGuard(context.device, context.mesh.loss)
    gc.collect()
    gc.disable()  # as in training; what is alive would depend on when it runs
    try:
        with counting, ExitStack() as hooks:
            for part in runner.parts:
                _name_phases(part, context, counting, hooks)
            counting.mark("", [batch.rows for batch in micro_batches])
            _take_step(1, runner, guard, micro_batches, counting, middle_once)
            static = _take_step(2, runner, guard, micro_batches, counting, middle_once)
            return replace(counting.recording(), static=static)
    finally:
        gc.enable()


def _take_step(
    step: int,
    runner: StepRunner,
    guard: NonFiniteGuard,
    micro_batches: Sequence[MicroBatch],
    counting: Counting,
    middle_once: bool,
) -> dict[str, int]:
    """Take a step as the trainer does; return the bytes of what stays alive, and of the gradients."""
    state = runner.optimizer.state.values()
    static: dict[str, list[torch.Tensor]] = {
        "parameters": [parameter for part in runner.parts for parameter in part.parameters()],
        "optimizer": [value for values in state for value in values.values() if isinstance(value, torch.Tensor)],
        "buffers": [buffer for part in runner.parts for buffer in part.buffers()],
    }
    for kind, tensors in static.items():
        counting.mark(kind, tensors)
    counting.restart()
    counting.enter_phase("valid tokens")
    valid_tokens = guard.all_reduce_tokens(count_valid(torch.stack([batch.labels for batch in micro_batches])))
    run = [*micro_batches[:2], micro_batches[-1]] if middle_once and len(micro_batches) > 3 else micro_batches
    loss = runner.forward_backward(step, run, valid_tokens)
    static["gradients"] = [parameter.grad for parameter in runner.parameters if parameter.grad is not None]
    counting.mark("gradients", static["gradients"])
    sizes = {kind: storage_bytes(tensors) for kind, tensors in static.items()}
    static.clear()
    guard.record(step, loss, runner.clip_gradients())
    runner.update(step)
    return sizes


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the storages behind tensors or their shards, each counted once."""
    storages = [local_part(tensor).untyped_storage() for tensor in tensors]
    return sum({storage_key(storage): storage.nbytes() for storage in storages}.values())


def _name_phases(part: nn.Module, context: Context, counting: Counting, hooks: ExitStack) -> None:
    """Let the counting know which block is computed; each counts from when its parameters are gathered for it."""

    def on_gradient(phase: str, hidden: Any) -> None:
        if isinstance(hidden, torch.Tensor) and hidden.requires_grad:
            hidden.register_hook(lambda gradient: counting.enter_phase(phase))

    def enter(number: int, module: nn.Module, args: tuple[Any, ...]) -> None:
        counting.enter_phase(f"forward {number}")
        if number == first:
            on_gradient("backward embedding", args[0])

    def leave(number: int, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        on_gradient(f"backward {number}", output)
        if number == last:
            counting.enter_phase("head")

    blocks = context.blocks(part)
    first, last = min(blocks), max(blocks)
    for number, block in blocks.items():  # hooks before FSDP2's
        hooks.callback(block.register_forward_pre_hook(partial(enter, number), prepend=True).remove)
        hooks.callback(block.register_forward_hook(partial(leave, number), prepend=True).remove)


def check_planned(job: Job) -> None:
    """Raise a UserError that names what a job does and a rehearsal does not."""
    config = job.config
    float8 = config.quantize.linear.float8.enable
    refused = {
        "training.enable_cpu_offload (memory of the host)": config.training.enable_cpu_offload,
        "quantize.linear.float8 (torchao's tensors)": float8,
        "parallelism.enable_async_tensor_parallel": config.parallelism.enable_async_tensor_parallel,
        "model.converters": bool(config.model.converters),
        "parallelism.context_parallel_degree": job.layout.cp > 1,
        "parallelism.pipeline_parallel_degree": job.layout.pp > 1,
    }
    if named := [name for name, is_on in refused.items() if is_on]:
        raise UserError(f"not planned: {', '.join(named)}")


class _RMSNorm(torch.autograd.Function):
    """What CUDA's kernels allocate, read and write: beside the result one float32 a row; the values mean nothing."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight, hidden[..., :1].to(torch.float32, copy=True))
        return hidden * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        hidden, weight, _ = ctx.saved_tensors
        return gradient * hidden, None if weight is None else weight.clone()


def _rms_norm(
    hidden: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    if not isinstance(hidden, DTensor):
        result = _RMSNorm.apply(hidden, weight)
        assert isinstance(result, torch.Tensor)
        return result
    assert isinstance(weight, DTensor)
    local = _RMSNorm.apply(hidden.to_local(), weight.to_local(grad_placements=(Partial(),)))
    return DTensor.from_local(local, hidden.device_mesh, hidden.placements, run_check=False)


AS_ON_CUDA: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (torch.nn.functional, "rms_norm", _rms_norm),  # a CPU keeps copies in float32
    (decoder, "document_mask", lambda *args: None),  # a matrix on a CPU; on CUDA FlexAttention
)
"""What a CPU keeps and CUDA does not: where it is called, and what allocates as CUDA does."""


@contextmanager
def _replaced() -> Iterator[None]:
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in AS_ON_CUDA]
    try:
        for owner, name, substitute in AS_ON_CUDA:
            setattr(owner, name, substitute)
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)
