"""The loss of a micro-batch, whole or in chunks of the sequence, so that only one chunk's logits exist at a time.

Chunks are computed inside the model's forward pass, through its `head`, where FSDP has gathered the output layer's
weight. The gradients of a chunk are computed right after its loss, so that nothing is computed twice.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from titanlite.data.loader import MicroBatch
from titanlite.errors import UserError
from titanlite.parallel.dtensor import local_part
from titanlite.parallel.tensor import whole_sequence
from titanlite.train.loss import token_loss_sum

TokenLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""The sum over tokens for logits (batch, tokens, vocabulary) and labels (batch, tokens)."""


def model_loss(
    model: nn.Module,
    batch: MicroBatch,
    chunks: int,
    token_loss: TokenLoss = token_loss_sum,
    hidden: torch.Tensor | None = None,
    runs_again: Callable[[], bool] = lambda: False,
) -> torch.Tensor:
    """Return the sum of the token losses of a micro-batch, its sequences cut into `chunks`.

    The last stage of a pipeline has hidden states for the tokens, and may run a backward pass in two halves:
    `runs_again` says in the first that another comes.
    """
    inputs = batch.tokens if hidden is None else hidden
    if chunks == 1:
        return token_loss(model(inputs, batch.positions, batch.documents), batch.labels)
    head = partial(_loss_in_chunks, batch.labels, chunks, token_loss, runs_again)
    total = model(inputs, batch.positions, batch.documents, head=head)
    if total.dim():
        raise UserError(f"training.loss_chunks = {chunks}: {type(model).__name__}.forward does not call its `head`")
    return total


def _loss_in_chunks(
    labels: torch.Tensor,
    chunks: int,
    token_loss: TokenLoss,
    runs_again: Callable[[], bool],
    hidden: torch.Tensor,
    output: nn.Module,
) -> torch.Tensor:
    """Return the loss of the last hidden states (batch, tokens, dim), one chunk of the sequence at a time."""
    for parameter in output.parameters():
        if isinstance(parameter, DTensor):  # tensor parallel: gather the sequence once, then cut it
            hidden = whole_sequence(hidden, parameter.device_mesh)
            break
    pieces = [*zip(hidden.detach().tensor_split(chunks, dim=1), labels.tensor_split(chunks, dim=1), strict=True)]
    if not torch.is_grad_enabled():
        return torch.stack([token_loss(output(part), part_labels) for part, part_labels in pieces]).sum()
    trained = [parameter for parameter in output.parameters() if parameter.requires_grad]
    ways = lambda part, labels: token_loss(output(part), labels), runs_again  # noqa: E731
    total = _ChunkedLoss.apply(*ways, pieces, hidden, *trained)
    assert isinstance(total, torch.Tensor)
    return total


class _ChunkedLoss(torch.autograd.Function):
    """The loss of all pieces. Forward computes the gradients too, so that a piece's logits can be freed before the
    next; backward only scales them, and lets go of each: the head's is kept in float32."""

    @staticmethod
    def forward(
        ctx: Any,
        loss: TokenLoss,
        runs_again: Callable[[], bool],
        pieces: list[tuple[torch.Tensor, torch.Tensor]],
        hidden: torch.Tensor,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        total = torch.zeros((), device=hidden.device)
        hidden_gradients: list[torch.Tensor] = []
        sums: list[Any] = [None] * len(parameters)
        for part, labels in pieces:
            leaves = [part.requires_grad_()] if hidden.requires_grad else []
            with torch.enable_grad():
                value = loss(part, labels)
                gradients = list(torch.autograd.grad(value, [*leaves, *parameters]))
            total = total + value.detach()
            for number in reversed(range(len(parameters))):
                gradient = gradients.pop()  # as large as the weight: freed before the next logits are computed
                if sums[number] is None:  # in float32 or wider: sums in bfloat16 would lose bits
                    sums[number] = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
                else:
                    sums[number].add_(gradient)
                del gradient
            hidden_gradients += gradients
        ctx.gradients = [_join(hidden_gradients) if hidden_gradients else None, *sums]
        ctx.runs_again, ctx.is_scaled = runs_again, False
        ctx.dtypes = [tensor.dtype for tensor in (hidden, *parameters)]
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: torch.Tensor) -> Any:  # type: ignore[override]
        gradients = [*ctx.gradients]
        if not ctx.runs_again():
            ctx.gradients = None  # the loss, and so ctx, outlives the backward pass
        for number, dtype in enumerate(ctx.dtypes):
            if gradients[number] is not None:
                if not ctx.is_scaled:
                    local_part(gradients[number]).mul_(scale)
                gradients[number] = gradients[number].to(dtype)
        ctx.is_scaled = True
        return None, None, None, *gradients


def _join(parts: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate along the sequence. (torch.cat of DTensors would sum partial values over the ranks first.)"""
    joined, first = torch.cat([local_part(part) for part in parts], dim=1), parts[0]
    if not isinstance(first, DTensor):
        return joined
    return DTensor.from_local(joined, first.device_mesh, first.placements, run_check=False)
