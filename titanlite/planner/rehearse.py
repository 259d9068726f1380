"""Rehearse a training step: the code that trains runs once as one rank of a fake world, on tensors
without memory.

Exact, as `titanlite plan --selftest` compares with real processes: the bytes alive and the
collectives of the second step, when the optimizer has its state. Assumed, when a GPU is planned:
AS_ON_CUDA lists all that a CPU keeps and a GPU does not. With torch.compile the rehearsal is eager,
which allocates at least as much."""

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from math import prod
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial

from titanlite.config.job import Job
from titanlite.config.schema import with_values
from titanlite.data.loader import MicroBatch
from titanlite.errors import UserError
from titanlite.optim import build_optimizer, optimizer_bytes, trained_parameters
from titanlite.parallel.build import Context, build_model
from titanlite.parallel.dtensor import local_part
from titanlite.parallel.init import allocate
from titanlite.parallel.mesh import Mesh
from titanlite.parallel.parallelize import parallelize
from titanlite.planner.counting import Counting
from titanlite.planner.fake_world import FakeWorld
from titanlite.planner.record import Recording
from titanlite.planner.torch_private import fake_tensor_mode, storage_key, waiting_as_on_a_device
from titanlite.train.bad_steps import skips_updates
from titanlite.train.guard import StepGuard
from titanlite.train.loss import count_valid
from titanlite.train.step import StepRunner


class Rehearsal:
    """A job on one of its ranks, as it is after its first step; from then on steps are alike."""

    def __init__(self, job: Job, world: FakeWorld, rank: int = 0, as_on_cuda: bool = True) -> None:
        check_planned(job)
        mesh = world.mesh(job.layout, rank)
        self._context, self._parts = _skeleton(job, mesh)
        self.is_even = all(
            _is_even(parameter) for part in self._parts for parameter in part.parameters()
        )
        """Whether every rank has shards of the same shapes."""
        self._fake, self._device = fake_tensor_mode(), _as_on_cuda if as_on_cuda else nullcontext
        with self._device(self._parts), self._fake:
            for part in self._parts:
                allocate(part, self._context.device)
            trained = trained_parameters(
                self._parts, self._context.table, job.spec.blocks, job.config.optimizer.no_decay
            )
            self._parameters = [item.parameter for item in trained]
            self._optimizer = build_optimizer(trained, job.config)
            self._guard = StepGuard(job.config.fault, self._context.device, job.layout.tp)
        self._counting = Counting(job.layout)
        # Leaves the optimizer's state, flags, cached meshes, FSDP2's padded shards.
        self.step(job, middle_once=True)

    def step(self, job: Job, middle_once: bool = False) -> Recording:
        """Return a step of this job, or of one that differs only in batch and loss chunks.

        With `middle_once` it runs its first, second and last micro-batch: those between are like
        the second."""
        context, rank = replace(self._context, job=_eager(job)), dist.get_rank()
        with self._device(self._parts), self._fake, waiting_as_on_a_device():
            runner = StepRunner(
                context, self._parts, self._parameters, self._optimizer, seed=0, rank=rank
            )
            batches = blank_batches(job)
            run = [*batches[:2], batches[-1]] if middle_once and len(batches) > 3 else batches
            return _count_step(2, runner, batches, self._guard, self._counting, run)


def record_step(job: Job, rank: int = 0, as_on_cuda: bool = True) -> Recording:
    """Return the second step of a job on one of its ranks."""
    with FakeWorld() as world:
        return Rehearsal(job, world, rank, as_on_cuda).step(job)


def static_bytes(job: Job) -> dict[str, int]:
    """Return the bytes by kind that the first rank, which has the largest shards, keeps between
    steps.
    """
    with FakeWorld() as world:
        context, parts = _skeleton(job, world.mesh(job.layout))
        trained = trained_parameters(parts, context.table, job.spec.blocks, no_decay=())
        return {
            "parameters": _storage_bytes(
                parameter for part in parts for parameter in part.parameters()
            ),
            "gradients": _storage_bytes(item.parameter for item in trained),
            "optimizer": optimizer_bytes(trained, job.config),
            "buffers": _storage_bytes(buffer for part in parts for buffer in part.buffers()),
        }


def blank_batches(job: Job) -> list[MicroBatch]:
    """Return the micro-batches of a step, of the size that a rank reads."""
    shape = (
        job.batch.local,
        4 if job.config.training.document_mask else 2,
        job.config.training.seq_len,
    )
    return [
        MicroBatch(torch.zeros(shape, dtype=torch.int64)) for _ in range(job.batch.accumulation)
    ]


def count_later_step(runner: StepRunner, micro_batches: Sequence[MicroBatch]) -> Recording:
    """Take four steps on real tensors; return the later one of the smallest peak: gloo may free a
    buffer too late.
    """
    context, counting = runner.context, Counting(runner.context.job.layout)
    guard = StepGuard(context.job.config.fault, context.device, context.job.layout.tp)
    steps = [_count_step(step, runner, micro_batches, guard, counting) for step in range(1, 5)]
    return min(steps[1:], key=lambda step: step.peak)


def _eager(job: Job) -> Job:
    """Return the job without what only changes how its operations are run."""
    off = {"compile.enable": False, "parallelism.enable_async_tensor_parallel": False}
    return replace(job, config=with_values(job.config, off))


def _skeleton(job: Job, mesh: Mesh) -> tuple[Context, list[nn.Module]]:
    """Return a rank's parts of the model on the meta device, with every technique applied."""
    model, table = build_model(job)
    context = Context(_eager(job), mesh, table, torch.device("cpu"))
    parts, _ = parallelize(model, context)
    return context, parts


def _is_even(parameter: torch.Tensor) -> bool:
    if not isinstance(parameter, DTensor):
        return True
    sizes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    shards = prod(size for size, placement in sizes if not placement.is_replicate())
    return parameter.numel() == parameter.to_local().numel() * shards


def _count_step(
    step: int, runner: StepRunner, micro_batches: Sequence[MicroBatch], guard: StepGuard,
    counting: Counting, run: Sequence[MicroBatch] = (),
) -> Recording:  # fmt: skip
    """Take a step as the trainer does, on fake tensors or on real ones, and count it; `run` may
    leave some out.
    """
    state = runner.optimizer.state.values()
    gc.collect()
    gc.disable()  # as in training; the bytes alive would depend on when it runs
    try:
        with counting, ExitStack() as hooks:
            for part in runner.parts:
                _name_phases(part, runner.context, counting, hooks)
            counting.restart("valid tokens")
            static: dict[str, list[torch.Tensor]] = {
                "parameters": [
                    parameter for part in runner.parts for parameter in part.parameters()
                ],
                "optimizer": [
                    v for values in state for v in values.values() if isinstance(v, torch.Tensor)
                ],
                "buffers": [buffer for part in runner.parts for buffer in part.buffers()],
                "": [batch.rows for batch in micro_batches],
            }
            for kind, tensors in static.items():
                counting.mark(kind, tensors)
            labels = [batch.labels for batch in micro_batches]
            valid_tokens = guard.exchange(count_valid(torch.stack(labels)))
            loss = runner.forward_backward(step, run or micro_batches, valid_tokens)
            static["gradients"] = [
                parameter.grad for parameter in runner.parameters if parameter.grad is not None
            ]
            counting.mark("gradients", static["gradients"])
            sizes = {kind: _storage_bytes(tensors) for kind, tensors in static.items() if kind}
            static.clear()
            norm = runner.clip_gradients()
            runner.update(step, norm, guard.record(step, loss, norm))
            return replace(counting.recording(), static=sizes)
    finally:
        gc.enable()


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the storages behind tensors or their shards, each counted once."""
    storages = [local_part(tensor).untyped_storage() for tensor in tensors]
    return sum({storage_key(storage): storage.nbytes() for storage in storages}.values())


def _name_phases(part: nn.Module, context: Context, counting: Counting, hooks: ExitStack) -> None:
    """Name the block that is computed in the counting; a block begins when its parameters are
    gathered.
    """

    def on_gradient(phase: str, hidden: Any) -> None:
        if isinstance(hidden, torch.Tensor) and hidden.requires_grad:
            hidden.register_hook(lambda gradient: counting.enter_phase(phase))

    def enter(number: int, module: nn.Module, args: tuple[Any, ...]) -> None:
        counting.enter_phase(f"forward {number}")
        if number == min(blocks):
            on_gradient("backward embedding", args[0])

    def leave(number: int, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        on_gradient(f"backward {number}", output)
        if number == max(blocks):
            counting.enter_phase("head")

    blocks = context.blocks(part)
    for number, block in blocks.items():  # hooks before FSDP2's
        hooks.callback(block.register_forward_pre_hook(partial(enter, number), prepend=True).remove)
        hooks.callback(block.register_forward_hook(partial(leave, number), prepend=True).remove)


def check_planned(job: Job) -> None:
    """Raise a UserError that names a feature of the job that cannot be rehearsed."""
    config = job.config
    refused = {
        "skipping steps with optimizer.implementation other than fused (step counts on the host)": (
            skips_updates(config.fault)
            and config.optimizer.implementation != "fused"
            and config.optimizer.name != "SGD"
        ),
        "optimizer.name = Muon (its steps read numbers on the host)": config.optimizer.name
        == "Muon",
        "optimizer.state_dtype = bfloat16 (its steps read numbers on the host)": (
            config.optimizer.state_dtype == "bfloat16"
        ),
        "training.enable_cpu_offload (memory of the host)": config.training.enable_cpu_offload,
        "quantize.linear.float8 (torchao's tensors)": config.quantize.linear.float8.enable,
        "parallelism.enable_async_tensor_parallel": config.parallelism.enable_async_tensor_parallel,
        "model.converters": bool(config.model.converters),
        "experts (how many tokens each has depends on the data)": job.shape.experts > 0,
        "parallelism.context_parallel_degree": job.layout.cp > 1,
        "parallelism.pipeline_parallel_degree": job.layout.pp > 1,
    }
    if named := [name for name, is_on in refused.items() if is_on]:
        raise UserError(f"not planned: {', '.join(named)} can't be rehearsed yet")


class _RMSNorm(torch.autograd.Function):
    """The memory of CUDA's kernels: the result and one float32 a row; the values mean nothing."""

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


AS_ON_CUDA: dict[str, Callable[..., Any]] = {
    "rms_norm": _rms_norm,  # of torch.nn.functional: a CPU keeps copies in float32
    "attention_mask": lambda *args: (
        None
    ),  # of a model: a matrix on a CPU; on CUDA FlexAttention's, which is small
}
"""Operations that keep more on a CPU than on CUDA, with stand-ins that allocate as CUDA does."""


@contextmanager
def _as_on_cuda(parts: Iterable[nn.Module]) -> Iterator[None]:
    with ExitStack() as patches:
        for owner, (name, substitute) in product((torch.nn.functional, *parts), AS_ON_CUDA.items()):
            if hasattr(owner, name):
                patches.enter_context(patch.object(owner, name, substitute))
        yield
