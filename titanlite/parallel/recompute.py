"""Activation checkpointing: which activations the backward pass recomputes instead of keeping.

A block's forward method is replaced, not the block, so that parameter names stay and FSDP2's hooks
are not part of the recomputation.
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from titanlite.parallel.build import Context
from titanlite.parallel.expert_parallel import expert_modules, units
from titanlite.runtime.torch_private import ATTENTION_OPERATIONS, REDUCE_SCATTER_OPERATION

_EXPENSIVE = (
    *ATTENTION_OPERATIONS,
    torch.ops.higher_order.flex_attention,
    REDUCE_SCATTER_OPERATION,
    torch.ops.aten.max.default,  # float8's scale, which is all-reduced
)
"""Operations whose outputs are kept: the most expensive ones, and those that communicate."""
_MATMULS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.linear.default)


def apply(model: nn.Module, context: Context, around_graphs: bool = False) -> list[str]:
    """Replace the forward method of the blocks that recompute.

    Called twice: before blocks are compiled, and after it as `around_graphs`.
    """
    settings = context.job.config.activation_checkpoint
    if settings.mode not in ("full", "selective"):
        return []
    layout = context.job.layout
    by_operation = settings.mode == "selective" and settings.selective_ac_option == "op"
    # It appears twice in the order; a job uses one of the two. Usually the compiler gets a block
    # that already recomputes. Under tensor or context parallel, whole-block recomputation wraps the
    # compiled block, until torch 2.14 is the minimum: 2.13 fails to compile it, 2.11 and 2.14 don't
    # (2.14 tried under TP by aot_eager_decomp_partition, which partitions as inductor does).
    is_outside_compile = layout.tp * layout.cp > 1 and not by_operation
    if around_graphs != is_outside_compile:
        return []
    options: dict[str, Any] = {
        "preserve_rng_state": settings.preserve_rng_state,
        "early_stop": settings.early_stop,
    }
    every = 1
    if by_operation:
        options["context_fn"] = _keep_expensive
    elif settings.mode == "selective":
        every = int(settings.selective_ac_option)
    experts = {*expert_modules(model, context.table).values()}
    for number, block in context.blocks(model).items():
        if number % every:
            continue
        modules = [block]
        if by_operation:
            # Experts are recomputed inside FSDP's hooks, since their block's group does not gather
            # them.
            modules = [*units(block, experts), *experts.intersection(block.modules())]
        for module in modules:
            recomputed = partial(checkpoint, module.forward, use_reentrant=False, **options)
            module.forward = recomputed  # type: ignore[method-assign]
    note = "Applied activation checkpointing: recompute every block"
    if every > 1:
        note = f"Applied activation checkpointing: recompute one block in {every}"
    if by_operation:
        note += ", keeping attention, communication and every other matrix product"
    return [note]


def _keep_expensive() -> Any:
    """Return the contexts of one forward pass.

    They keep the results of expensive operations, and of every second matrix product.
    """
    matmuls = {False: 0, True: 0}  # counted separately in the forward pass and its recomputation

    def decide(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operation in _MATMULS:
            matmuls[context.is_recompute] += 1
            keep = matmuls[context.is_recompute] % 2 == 1
        else:
            keep = operation in _EXPENSIVE
        if keep:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(decide)
