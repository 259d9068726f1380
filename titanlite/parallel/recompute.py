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

from titanlite.config.schema import ActivationCheckpoint

_EXPENSIVE = (
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops.aten.max.default,  # the largest value that float8 scales by: an all-reduce hangs on it
)
"""Operations whose results are kept: recomputing them costs most, or communicates again."""
_MATMULS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.linear.default)


def apply(model: nn.Module, blocks: str, settings: ActivationCheckpoint) -> None:
    """Replace the forward method of the blocks that recompute."""
    every = int(settings.selective_ac_option) if settings.selective_ac_option.isdigit() else 1
    by_operation = settings.mode == "selective" and settings.selective_ac_option == "op"
    options: dict[str, Any] = {
        "use_reentrant": False,
        "preserve_rng_state": settings.preserve_rng_state,
        "early_stop": settings.early_stop,
    }
    if by_operation:
        options["context_fn"] = _keep_expensive
    for number, block in enumerate(model.get_submodule(blocks).children()):
        if settings.mode == "full" or number % every == 0:
            block.forward = partial(checkpoint, block.forward, **options)  # type: ignore[method-assign]


def keeps_nothing(settings: ActivationCheckpoint) -> bool:
    """Whether a block that recomputes does so whole."""
    return settings.mode == "full" or (settings.mode == "selective" and settings.selective_ac_option.isdigit())


def _keep_expensive() -> Any:
    """Contexts of one forward pass: keep what is expensive and every other matrix product, recompute the rest."""
    return create_selective_checkpoint_contexts(_policy())


def _policy() -> Callable[..., CheckpointPolicy]:
    seen = {False: 0, True: 0}  # matrix products, counted apart in the forward pass and its recomputation

    def decide(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operation in _MATMULS:
            seen[context.is_recompute] += 1
            keep = seen[context.is_recompute] % 2 == 1
        else:
            keep = operation in _EXPENSIVE
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return decide
