"""The loss of a micro-batch in chunks of the sequence.

Only one chunk's logits exist at a time. They are computed inside the model's forward
pass, through its `head`, where FSDP has gathered the output layer's weight. The gradients of a
chunk are computed right after its loss, so that nothing is computed twice.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from titanlite.parallel.dtensor import local_part
from titanlite.parallel.tensor_parallel import whole_sequence


def loss_in_chunks(
    labels: torch.Tensor,
    chunks: int,
    token_loss: Callable[..., torch.Tensor],
    runs_again: Callable[[], bool],
    hidden: torch.Tensor,
    output: nn.Module,
) -> torch.Tensor:
    """Return the loss of the last hidden states (batch, tokens, dim), one chunk at a time."""
    for parameter in output.parameters():
        if isinstance(parameter, DTensor):  # tensor parallel: gather the sequence once, then cut it
            hidden = whole_sequence(hidden, parameter.device_mesh)
            break
    hidden_pieces = hidden.detach().tensor_split(chunks, dim=1)
    label_pieces = labels.tensor_split(chunks, dim=1)
    pieces = list(zip(hidden_pieces, label_pieces, strict=True))

    def loss_of(part: torch.Tensor, part_labels: torch.Tensor) -> torch.Tensor:
        return token_loss(output(part), part_labels)

    if not torch.is_grad_enabled():
        return torch.stack([loss_of(*piece) for piece in pieces]).sum()
    trained = [parameter for parameter in output.parameters() if parameter.requires_grad]
    total = _ChunkedLoss.apply(loss_of, runs_again, pieces, hidden, *trained)
    assert isinstance(total, torch.Tensor)
    return total


class _ChunkedLoss(torch.autograd.Function):
    """The loss of all pieces.

    Forward computes the gradients too, so that a piece's logits are freed before the next; backward
    only scales them, and frees each after its use: the head's is kept in float32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        loss: Callable[..., torch.Tensor],
        runs_again: Callable[[], bool],
        pieces: list[tuple[torch.Tensor, torch.Tensor]],
        hidden: torch.Tensor,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        total = torch.zeros((), device=hidden.device)
        hidden_gradients: list[torch.Tensor] = []
        sums: list[Any] = [None] * len(parameters)
        for part, labels in pieces:
            leaves = [*parameters]
            if hidden.requires_grad:
                leaves.insert(0, part.requires_grad_())
            with torch.enable_grad():
                value = loss(part, labels)
                gradients = list(torch.autograd.grad(value, leaves))
            total = total + value.detach()
            for number in reversed(range(len(parameters))):
                gradient = gradients.pop()
                if sums[number] is None:  # in float32 or wider: sums in bfloat16 would lose bits
                    wide = torch.promote_types(gradient.dtype, torch.float32)
                    sums[number] = gradient.to(wide, copy=True)
                else:
                    sums[number].add_(gradient)
                del gradient  # as large as the weight: freed before the next logits are computed
            hidden_gradients += gradients  # those that are left
        joined = _join(hidden_gradients) if hidden_gradients else None
        ctx.gradients = [joined, *sums]
        ctx.runs_again = runs_again
        ctx.is_scaled = False
        ctx.dtypes = [tensor.dtype for tensor in (hidden, *parameters)]
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: torch.Tensor) -> Any:  # type: ignore[override]
        gradients = [*ctx.gradients]
        if not ctx.runs_again():
            ctx.gradients = None  # the loss, and so ctx, outlives the backward pass
        for number, dtype in enumerate(ctx.dtypes):
            if gradients[number] is None:
                continue
            if not ctx.is_scaled:
                local_part(gradients[number]).mul_(scale)
            gradients[number] = gradients[number].to(dtype)
        ctx.is_scaled = True
        return None, None, None, *gradients


def _join(parts: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate along the sequence.

    (torch.cat of DTensors would sum partial values over the ranks first.)
    """
    joined = torch.cat([local_part(part) for part in parts], dim=1)
    first = parts[0]
    if not isinstance(first, DTensor):
        return joined
    return DTensor.from_local(joined, first.device_mesh, first.placements, run_check=False)
