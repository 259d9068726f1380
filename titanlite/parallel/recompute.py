"""Activation checkpointing: which activations are recomputed in the backward pass instead of kept.

A block's forward method is replaced, not the block: parameter names stay, and FSDP2's hooks stay outside of what is
recomputed.
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from titanlite.parallel.build import Context
from titanlite.parallel.expert import expert_modules, units
from titanlite.runtime.torch_private import ATTENTION_OPERATIONS, REDUCE_SCATTER_OPERATION

_EXPENSIVE = (
    *ATTENTION_OPERATIONS,
    torch.ops.higher_order.flex_attention,
    REDUCE_SCATTER_OPERATION,
    torch.ops.aten.max.default,  # the largest value that float8 scales by: an all-reduce hangs on it
)
"""Operations whose results are kept: recomputing them costs most, or communicates again."""
_MATMULS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.linear.default)


def apply(model: nn.Module, context: Context, around_graphs: bool = False) -> list[str]:
    """Replace the forward method of the blocks that recompute; `around_graphs` after they were compiled."""
    settings = context.job.config.activation_checkpoint
    if settings.mode not in ("full", "selective"):
        return []
    by_operation = settings.mode == "selective" and settings.selective_ac_option == "op"
    # torch 2.13 (2.11 does not) fails on a graph with a mesh in it that is recomputed whole. Under tensor or context
    # parallel, where blocks have a mesh, a compiled block runs again instead.
    if around_graphs != (context.job.layout.tp * context.job.layout.cp > 1 and not by_operation):
        return []
    every = int(settings.selective_ac_option) if settings.mode == "selective" and not by_operation else 1
    options: dict[str, Any] = {"preserve_rng_state": settings.preserve_rng_state, "early_stop": settings.early_stop}
    if by_operation:
        options["context_fn"] = _keep_expensive
    experts = {*expert_modules(model, context.table).values()}
    for number, block in context.blocks(model).items():
        if number % every:
            continue
        # By operation, experts are recomputed within FSDP's hooks: their group is not gathered when their block is.
        inside = [*units(block, experts), *experts.intersection(block.modules())] if by_operation else [block]
        for module in inside:
            module.forward = partial(checkpoint, module.forward, use_reentrant=False, **options)  # type: ignore
    blocks = "every block" if every == 1 else f"one block in {every}"
    saved = ", keeping attention, communication and every other matrix product" * by_operation
    return [f"Applied activation checkpointing: recompute {blocks}{saved}"]


def _keep_expensive() -> Any:
    """Return the contexts of one forward pass: keep expensive results and every other matrix product."""
    matmuls = {False: 0, True: 0}  # counted apart in the forward pass and its recomputation

    def decide(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operation in _MATMULS:
            matmuls[context.is_recompute] += 1
            keep = matmuls[context.is_recompute] % 2 == 1
        else:
            keep = operation in _EXPENSIVE
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(decide)
