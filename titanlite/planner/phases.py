"""Name the phases of a rehearsed step, and the events of a pipeline rank."""

import re
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from titanlite.parallel.build import Context
from titanlite.parallel.pipeline_parallel import Pipeline
from titanlite.planner.counting import PHASE_OF_REGION, Counting
from titanlite.planner.record import Event
from titanlite.planner.torch_private import around_sends, before_actions, replaced

_TRANSFERS = {
    "get_fwd_recv_ops": "forward receive",
    "get_fwd_send_ops": "forward send",
    "get_bwd_recv_ops": "backward receive",
    "get_bwd_send_ops": "backward send",
}
"""The methods that torch calls for what a stage receives and sends, and the phase of each."""


def name_phases_of_stages(pipeline: Pipeline, counting: Counting, hooks: ExitStack) -> None:
    """Name actions, the gaps between them, and a stage's computation: its blocks, and the code
    before and after them.
    """
    begin = pipeline.begin

    def act(index: int, kind: str, number: int) -> None:
        stage = next(stage for stage in pipeline.stages if stage.stage_index == index)
        regions = PHASE_OF_REGION | _regions(stage, kind, pipeline.context)
        counting.phase_of_region = regions.get
        direction = "backward"
        if kind == "F":
            direction = "forward"
        counting.begin(Event(kind, index, number), regions[direction])
        begin(index, kind, number)

    def gather(index: int) -> None:
        groups(Event("gather", index), "forward gather", lambda: None)

    groups = partial(_name_groups, pipeline.job.spec.blocks, counting)
    hooks.enter_context(replaced(pipeline, "begin", act))
    hooks.enter_context(before_actions(pipeline.schedule, gather))
    step = partial(_step, pipeline, counting, pipeline.schedule.step)
    hooks.enter_context(replaced(pipeline.schedule, "step", step))
    hooks.enter_context(around_sends(lambda operation: counting.begin(*operation.begins)))
    for stage in pipeline.stages:
        for method, phase in _TRANSFERS.items():
            transfer = partial(
                _transfer, counting, phase, stage.stage_index, getattr(stage, method)
            )
            hooks.enter_context(replaced(stage, method, transfer))
        if isinstance(stage.submod, FSDPModule):
            unshard = partial(groups, None, "forward gather", stage.submod.unshard)
            hooks.enter_context(replaced(stage.submod, "unshard", unshard))
        event = Event("reduce", stage.stage_index, 1)
        reduce = partial(groups, event, "backward reduction", stage.perform_reduce_grad)
        hooks.enter_context(replaced(stage, "perform_reduce_grad", reduce))
        before = "input"
        after = "forward output"
        if stage.is_first:
            before = "embedding"
        if stage.is_last:
            after = "head"
        name_phases(stage.submod, pipeline.context, counting, hooks, before, after)


def _step(
    pipeline: Pipeline, counting: Counting, step: Callable[..., None], losses: list[torch.Tensor],
    **options: Any,
) -> None:  # fmt: skip
    """Run the schedule, and add the losses of the micro-batches that it omitted."""
    step(losses=losses, **options)
    left_out = len(options["target"]) - pipeline.job.stages.micro_batches
    if left_out:
        counting.begin(Event("left out"), "head")
        losses += [loss.clone() for loss in losses[:1] * left_out]
    counting.begin(Event("rest"), "sum of losses")
    counting.phase_of_region = PHASE_OF_REGION.get


def _transfer(
    counting: Counting, phase: str, index: int, operations: Callable[[int], list[Any]], number: int
) -> list[Any]:
    """Begin to receive, or attach to the operations of a send the event that they begin."""
    direction, verb = phase.split()
    event = Event(f"{verb} {direction[0].upper()}", index, number)
    if verb == "receive":
        counting.begin(event, phase)
    found = operations(number)
    for operation in found:
        operation.begins = event, phase
    return found


def _name_groups(
    blocks: str, counting: Counting, event: Event | None, phase: str, run: Callable[..., Any],
    *args: Any, **options: Any,
) -> Any:  # fmt: skip
    """Gather or reduce a stage's parameters outside of its actions, and name the blocks after
    FSDP2's regions.
    """

    def phase_of(region: str) -> str:
        block = re.search(rf"\({re.escape(blocks)}\.(\d+)", region)
        if block:
            return f"{phase} {block[1]}"
        return phase

    counting.begin(event or counting.event, phase)
    counting.phase_of_region = phase_of
    return run(*args, **options)


def _regions(stage: Any, kind: str, context: Context) -> dict[str, str]:
    """Return the phases that begin a stage's action, where they differ from a whole model's."""
    begins = {}
    if not stage.is_first:
        begins = {"forward": "forward input"}
    if stage.is_last and not context.blocks(stage.submod):
        begins = {"forward": "head"}
    if kind == "W":
        begins["backward"] = "backward weights"
    elif not stage.is_last:
        begins["backward"] = "backward gradient"
    return begins


def name_phases(
    part: nn.Module,
    context: Context,
    counting: Counting,
    hooks: ExitStack,
    before: str = "embedding",
    after: str = "head",
) -> None:
    """Name each block, and the code before and after the blocks, as phases of the counting; a block
    begins when its parameters are gathered.
    """

    def on_gradient(phase: str, hidden: Any) -> None:
        if isinstance(hidden, torch.Tensor) and hidden.requires_grad:
            hidden.register_hook(lambda gradient: counting.enter_phase(phase))

    def enter(number: int, module: nn.Module, args: tuple[Any, ...]) -> None:
        counting.enter_phase(f"forward {number}")
        if number == min(blocks):
            on_gradient(f"backward {before}", args[0])

    def leave(number: int, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        on_gradient(f"backward {number}", output)
        if number == max(blocks):
            counting.enter_phase(after)

    blocks = context.blocks(part)  # none in a stage with only the modules before or after them
    for number, block in blocks.items():  # hooks before FSDP2's
        hooks.callback(block.register_forward_pre_hook(partial(enter, number), prepend=True).remove)
        hooks.callback(block.register_forward_hook(partial(leave, number), prepend=True).remove)
