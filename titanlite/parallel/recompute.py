"""Activation checkpointing: which activations are recomputed in the backward pass instead of kept.

A block's forward method is replaced, not the block: parameter names stay, and FSDP2's hooks stay outside of what is
recomputed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from titanlite.parallel.build import Context
from titanlite.runtime.torch_private import ATTENTION_OPERATIONS, REDUCE_SCATTER_OPERATION

_EXPENSIVE = (
    *ATTENTION_OPERATIONS,
    REDUCE_SCATTER_OPERATION,
    torch.ops.aten.max.default,  # the largest value that float8 scales by: an all-reduce hangs on it
)
"""Operations whose results are kept: recomputing them costs most, or communicates again."""
_MATMULS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.linear.default)


def apply(model: nn.Module, context: Context) -> list[str]:
    """Replace the forward method of the blocks that recompute, where compiling them comes after."""
    return [] if _is_outside_of_graphs(context) else _apply(model, context)


def apply_outside_of_graphs(model: nn.Module, context: Context) -> list[str]:
    """Replace the forward method of blocks that were compiled before, for a fault of torch 2.13."""
    return _apply(model, context) if _is_outside_of_graphs(context) else []


def _is_outside_of_graphs(context: Context) -> bool:
    """Return whether compiled blocks are recomputed from outside.

    torch 2.13 (2.11 does not) fails on a graph with a mesh in it that is recomputed whole, so under tensor parallel
    a compiled block runs again instead.
    """
    settings = context.job.config.activation_checkpoint
    recomputes_whole_blocks = settings.mode == "full" or settings.selective_ac_option.isdigit()
    return context.job.layout.tp > 1 and recomputes_whole_blocks


def _apply(model: nn.Module, context: Context) -> list[str]:
    settings = context.job.config.activation_checkpoint
    if settings.mode not in ("full", "selective"):
        return []
    every = 1
    which = "every block"
    options: dict[str, Any] = {
        "use_reentrant": False,
        "preserve_rng_state": settings.preserve_rng_state,
        "early_stop": settings.early_stop,
    }
    if settings.mode == "selective" and settings.selective_ac_option == "op":
        options["context_fn"] = _keep_expensive
        which = "every block but for attention, communication and every other matrix product"
    elif settings.mode == "selective":
        every = int(settings.selective_ac_option)
        which = f"one block in {every}"
    for number, block in context.blocks(model).items():
        if number % every == 0:
            block.forward = partial(checkpoint, block.forward, **options)  # type: ignore[method-assign]
    return [f"Applied activation checkpointing: recompute {which}"]


def _keep_expensive() -> Any:
    """Return the contexts of one forward pass: keep expensive results and every other matrix product."""
    return create_selective_checkpoint_contexts(_policy())


def _policy() -> Callable[..., CheckpointPolicy]:
    matmuls = {False: 0, True: 0}  # counted apart in the forward pass and its recomputation

    def decide(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operation in _MATMULS:
            matmuls[context.is_recompute] += 1
            keep = matmuls[context.is_recompute] % 2 == 1
        else:
            keep = operation in _EXPENSIVE
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return decide
