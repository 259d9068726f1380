"""Rehearse a training step: run the training code once as one rank of a fake world, on tensors
without memory.

Exact, as tests/planner/test_exact.py confirms against real processes: the bytes alive and the
collectives of the second step, when the optimizer has its state. Assumed in a plan for GPUs:
AS_ON_CUDA lists everything that a CPU keeps and a GPU does not."""

import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from traceback import walk_tb
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from titanlite.config.job import Job
from titanlite.config.optimizer_state import place_of_state, state_dtype, streams_state
from titanlite.config.schema import JobConfig, with_values
from titanlite.config.torchtitan import FLOAT8_CONVERTERS
from titanlite.data.loader import MicroBatch
from titanlite.errors import UserError, first_line
from titanlite.models.common import moe
from titanlite.models.common.attention import causal_rows
from titanlite.optim import optimizer_bytes, trained_parameters
from titanlite.optim.streamed import buffer_bytes
from titanlite.parallel.build import Context, Converter, build_model, exchange_sizes
from titanlite.parallel.convert import build_converters
from titanlite.parallel.dtensor import local_part
from titanlite.parallel.init import allocate
from titanlite.parallel.mesh import Mesh
from titanlite.parallel.parallelize import parallelize
from titanlite.parallel.pipeline_parallel import Pipeline
from titanlite.planner import stand_ins
from titanlite.planner.compiled import compile_without_code
from titanlite.planner.counting import Counting
from titanlite.planner.fake_world import FakeWorld
from titanlite.planner.phases import name_phases, name_phases_of_stages
from titanlite.planner.pipeline import shortened_job
from titanlite.planner.record import DISK, KINDS, Collective, Operation, Recording
from titanlite.planner.torch_private import (
    fake_tensor_mode,
    holding_what_is_sent,
    real_tensors,
    replaced,
    storage_key,
    untraceable,
    waiting_as_on_a_device,
    without_values,
)
from titanlite.train.forward import take
from titanlite.train.guard import StepGuard
from titanlite.train.step import StepRunner, build_step_runner

_WITHOUT_STATE = {
    "optimizer.name": "SGD",
    "optimizer.weight_decay": 0.0,
    "optimizer.state_on": "device",
    "optimizer.state_dtype": "like_parameters",
}
"""Settings of an optimizer without state; _with_streamed_state adds it."""


def rehearse(
    job: Job,
    world: FakeWorld,
    rank: int = 0,
    as_on_cuda: bool = True,
    imbalance: float = 1,
    whole: bool = False,
) -> Recording:
    """Return the second step of a job on one of its ranks; all later steps are like it.

    The rank receives `imbalance` times the average number of rows for its experts. Unless the step
    is to be `whole`, it has only the first, the second and the last micro-batch, since those in
    between are like the second; a pipeline's step is shortened too."""
    check_planned(job)
    logging.getLogger("torch").setLevel(logging.ERROR)  # the compiler's advice is for real runs
    causal_rows.cache_clear()  # cached masks would be missing from this rehearsal's memory
    config = job.config
    mesh = world.mesh(job.layout, rank)
    sizes = partial(stand_ins.balanced, job.shape.experts, rank, imbalance)
    context, parts = _skeleton(job, mesh, build_converters(job), sizes)
    # A rank's last event frees all sent tensors at once, except on CUDA.
    is_short = not whole and (as_on_cuda or job.layout.pp == 1)
    with job.spec.on_cpu(), _rehearsing(parts, as_on_cuda, job.layout.pp > 1):
        for part in parts:
            allocate(part, context.device)
        guard = StepGuard(config.fault, context.device, job.layout.tp, copy=stand_ins.late_copy)
        if is_short:
            context = replace(context, job=shortened_job(job))
        # On real tensors, since a pipeline reads a mesh's values when it is built.
        with real_tensors():
            runner = build_step_runner(context, parts, 0, rank, _without_streamed_state(config))
        counting = Counting(job.layout, as_on_cuda and config.training.enable_cpu_offload)

        def step(first: int) -> Recording:
            batches = run = blank_batches(runner)
            if job.layout.pp == 1 and len(batches) > first + 1:
                run = [*batches[:first], batches[-1]]
            return _count_step(2, runner, batches, guard, counting, run)

        step(0)  # leaves the optimizer's state, flags, cached meshes, FSDP2's padded shards
        first = job.batch.accumulation
        if is_short:
            first = 2
        found = step(first)
        if streams_state(config):
            state = optimizer_bytes(runner.trained, config)
            found = _with_streamed_state(found, state, config, as_on_cuda)
        return found


def _without_streamed_state(config: JobConfig) -> JobConfig:
    """Return a config whose optimizer has no state, if the state streams."""
    if streams_state(config):
        return with_values(config, _WITHOUT_STATE)
    return config


def _with_streamed_state(
    found: Recording, state: int, config: JobConfig, as_on_cuda: bool
) -> Recording:
    """Return a step of an optimizer without state with what streams through it: the bytes of the
    state where it is kept, the buffers, and the traffic.
    """
    place = place_of_state(config)
    offloaded = as_on_cuda and config.training.enable_cpu_offload
    beside = "host" if offloaded else "optimizer"
    kept = {"device": beside, "host": "host" if as_on_cuda else beside}.get(place, DISK)
    static = {**found.static, kept: found.static.get(kept, 0) + state}
    buffers = buffer_bytes(config)
    operations = []
    for one in found.operations:
        if kept != DISK:
            one = _with_bytes(one, kept, state)
        if one.phase.startswith("optimizer"):
            one = _with_bytes(one, beside, buffers)
        operations.append(one)
    last = replace(operations[-1], flops=0, moved=2 * state, collective=None)
    operations.append(last)
    if place != "device" and as_on_cuda and not offloaded:
        for way in ("to GPU", "from GPU"):
            sent = Collective(way, "host", 1, state_dtype(config), state)
            operations.append(replace(last, moved=state, collective=sent))
    return replace(found, operations=operations, static=static)


def _with_bytes(operation: Operation, kind: str, size: int) -> Operation:
    """Return an operation during which `size` more bytes of a kind are alive."""
    by_kind = [*operation.by_kind]
    by_kind[KINDS.index(kind)] += size
    live = operation.live + size * (kind != "host")
    return replace(operation, live=live, by_kind=tuple(by_kind))


@contextmanager
def _rehearsing(parts: list[nn.Module], as_on_cuda: bool, is_pipeline: bool) -> Iterator[None]:
    with (
        _naming_what_fails(parts),
        stand_ins.as_on_cuda(parts) if as_on_cuda else nullcontext(),
        holding_what_is_sent() if is_pipeline and not as_on_cuda else nullcontext(),
        fake_tensor_mode(),
        waiting_as_on_a_device(),
        without_values(),
        replaced(moe, "sizes_on_host", stand_ins.even_groups),  # models have no Context
        replaced(torch, "compile", compile_without_code),
    ):
        yield


def record_step(job: Job, rank: int = 0, as_on_cuda: bool = True) -> Recording:
    """Return the second step of a job on one of its ranks."""
    with FakeWorld() as world:
        return rehearse(job, world, rank, as_on_cuda, whole=True)


def static_bytes(job: Job) -> dict[str, int]:
    """Return the bytes by kind that the first rank, which has the largest shards, holds between
    steps.
    """
    with FakeWorld() as world:
        eager = replace(job, config=with_values(job.config, {"compile.enable": False}))
        context, parts = _skeleton(eager, world.mesh(job.layout))
        trained = trained_parameters(parts, context.table, job.spec.blocks, no_decay=())
        whole = nn.ModuleList(parts)
        return {
            "parameters": _storage_bytes(whole.parameters()),
            "gradients": _storage_bytes(item.parameter for item in trained),
            "optimizer": optimizer_bytes(trained, job.config),
            "buffers": _storage_bytes(whole.buffers()),
        }


def blank_batches(runner: StepRunner) -> list[MicroBatch]:
    """Return the micro-batches of a step, of the size that a rank reads."""
    job = runner.context.job
    channels = 2
    if job.config.training.document_mask:
        channels = 4
    shape = (job.batch.local, channels, job.config.training.seq_len)
    blank = (torch.zeros(shape, dtype=torch.int64) for _ in range(job.batch.accumulation))
    return [take(runner.model, MicroBatch(rows)) for rows in blank]


def count_later_step(runner: StepRunner, micro_batches: Sequence[MicroBatch]) -> Recording:
    """Take four steps on real tensors, and return the one after the first with the lowest peak,
    since gloo may free a buffer late.
    """
    context = runner.context
    counting = Counting(runner.context.job.layout)
    guard = StepGuard(context.job.config.fault, context.device, context.job.layout.tp)
    wait = dist.Work.wait

    def wait_unseen(work: dist.Work, *arguments: Any) -> bool:
        with counting.hide():  # gloo copies out of a private buffer
            return wait(work, *arguments)

    with replaced(dist.Work, "wait", wait_unseen):
        steps = [_count_step(step, runner, micro_batches, guard, counting) for step in range(1, 5)]
    return min(steps[1:], key=lambda step: step.peak)


def _skeleton(
    job: Job,
    mesh: Mesh,
    converters: Sequence[Converter] = (),
    sizes: Callable[..., list[list[int]]] = exchange_sizes,
) -> tuple[Context, list[nn.Module]]:
    """Return a rank's parts of the model on the meta device, with every technique applied."""
    model, table = build_model(job)
    # Inductor, which implements the overlap, generates no code in a rehearsal.
    alone = {"parallelism.enable_async_tensor_parallel": False}
    job = replace(job, config=with_values(job.config, alone))
    context = Context(job, mesh, table, torch.device("cpu"), converters, sizes)
    with replaced(torch, "compile", compile_without_code):
        parts, _ = parallelize(model, context)
    return context, parts


def _count_step(
    step: int, runner: StepRunner, micro_batches: Sequence[MicroBatch], guard: StepGuard,
    counting: Counting, run: Sequence[MicroBatch] = (),
) -> Recording:  # fmt: skip
    """Take a step as the trainer does, on fake or real tensors, and count it; only the
    micro-batches of `run` are computed, if it has any.
    """
    gc.collect()
    gc.disable()  # as in training; otherwise the bytes alive would depend on when it runs
    try:
        with counting, ExitStack() as hooks:
            if isinstance(runner.model, Pipeline):
                name_phases_of_stages(runner.model, counting, hooks)
            else:
                name_phases(runner.model.parts[0], runner.context, counting, hooks)
            counting.restart("valid tokens")
            static = _static_tensors(runner)
            static[""] = [batch.rows for batch in micro_batches]
            for kind, tensors in static.items():
                counting.mark(kind, tensors)
            own_tokens = runner.count_valid(micro_batches)  # kept until the end, as in a run
            valid_tokens = guard.exchange(own_tokens)
            loss = runner.forward_backward(step, run or micro_batches, valid_tokens)
            static["gradients"] = [
                parameter.grad for parameter in runner.parameters if parameter.grad is not None
            ]
            counting.mark("gradients", static["gradients"])
            sizes = {kind: _storage_bytes(tensors) for kind, tensors in static.items() if kind}
            if counting.offloads:
                sizes = {"buffers": sizes.pop("buffers"), "host": sum(sizes.values())}
            static.clear()
            norm = runner.gradient_norm()
            runner.update(step, norm, guard.record(step, loss, norm))
            recording = replace(counting.recording(), static=sizes)
        guard.read()
        return recording
    finally:
        gc.enable()


def _static_tensors(runner: StepRunner) -> dict[str, list[torch.Tensor]]:
    """Return the tensors of a rank that live from step to step, by kind."""
    whole = nn.ModuleList(runner.model.parts)
    state = []
    for values in runner.optimizer.state.values():
        state += [value for value in values.values() if isinstance(value, torch.Tensor)]
    return {
        "parameters": [*whole.parameters()],
        "optimizer": state,
        "buffers": [*whole.buffers()],
    }


@contextmanager
def _naming_what_fails(parts: Sequence[nn.Module]) -> Iterator[None]:
    """Raise a UserError that names the operation that needs values, or the module that fails."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        names = {}
        for part in parts:
            for name, module in part.named_modules():
                names[module] = name
        callers = [frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__)]
        inner = [names[one] for one in callers if isinstance(one, nn.Module) and one in names]
        where = ""
        if inner:
            where = f" of {inner[-1]}"
        if isinstance(error, untraceable()):
            operation = getattr(error, "func", error)
            why = f"{operation}{where} needs the values of tensors, which a rehearsal lacks"
        elif inner:
            why = f"{inner[-1]} raises {type(error).__name__}: {first_line(error)}"
        else:
            raise
        raise UserError(f"not planned: {why}") from error


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the storages behind tensors or their shards, each counted once."""
    storages = [local_part(tensor).untyped_storage() for tensor in tensors]
    return sum({storage_key(storage): storage.nbytes() for storage in storages}.values())


def check_planned(job: Job) -> None:
    """Raise a UserError if a job has converters that cannot be planned."""
    if {*job.config.model.converters} - {*FLOAT8_CONVERTERS}:
        raise UserError("not planned: model.converters can't be rehearsed yet")
