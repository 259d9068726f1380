"""The loss of a micro-batch, whole or in chunks of the sequence: then the logits of one chunk exist at a time.

The chunks are worked off inside the model's forward pass, through its `head`, where the output layer's weight is
gathered already; each chunk's gradients are found right after its loss, so nothing is computed twice.
"""

from __future__ import annotations

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
"""The sum over tokens of what logits (batch, tokens, vocabulary) and labels (batch, tokens) give."""


def model_loss(model: nn.Module, batch: MicroBatch, chunks: int, loss: TokenLoss = token_loss_sum) -> torch.Tensor:
    """Sum of the token losses of a micro-batch, its sequences cut into that many chunks."""
    if chunks == 1:
        return loss(model(batch.tokens, batch.positions, batch.documents), batch.labels)
    head = partial(_chunked, batch.labels, chunks, loss)
    total = model(batch.tokens, batch.positions, batch.documents, head=head)
    if total.dim():
        raise UserError(f"training.loss_chunks = {chunks}: {type(model).__name__}.forward does not call its `head`")
    return total


def _chunked(
    labels: torch.Tensor, chunks: int, loss: TokenLoss, hidden: torch.Tensor, output: nn.Module
) -> torch.Tensor:
    """The loss of the last hidden states, a chunk of the sequence at a time; called inside the forward pass."""
    for parameter in output.parameters():
        if isinstance(parameter, DTensor):  # tensor parallel: gather the sequence once, then cut
            hidden = whole_sequence(hidden, parameter.device_mesh)
            break
    pieces = [*zip(hidden.detach().tensor_split(chunks, dim=1), labels.tensor_split(chunks, dim=1), strict=True)]
    if not torch.is_grad_enabled():
        return torch.stack([loss(output(part), those) for part, those in pieces]).sum()
    trained = [parameter for parameter in output.parameters() if parameter.requires_grad]
    total = _ChunkedLoss.apply(lambda part, those: loss(output(part), those), pieces, hidden, *trained)
    assert isinstance(total, torch.Tensor)
    return total


class _ChunkedLoss(torch.autograd.Function):
    """The loss of all pieces, with the gradients of each found right after its loss: then its logits can go, and
    none are computed twice. Only scaling them is left to the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        loss: TokenLoss,
        pieces: list[tuple[torch.Tensor, torch.Tensor]],
        hidden: torch.Tensor,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        total = torch.zeros((), device=hidden.device)
        of_hidden: list[torch.Tensor] = []
        summed: list[Any] = [None] * len(parameters)
        for part, labels in pieces:
            leaves = [part.requires_grad_()] if hidden.requires_grad else []
            with torch.enable_grad():
                value = loss(part, labels)
                found = list(torch.autograd.grad(value, [*leaves, *parameters]))
            total = total + value.detach()
            for number in reversed(range(len(parameters))):
                more = found.pop()  # as large as the output's weight, and gone before the next logits come
                if summed[number] is None:  # in float32 or wider: every sum in bfloat16 would lose bits
                    summed[number] = more.to(torch.promote_types(more.dtype, torch.float32), copy=True)
                else:
                    summed[number].add_(more)
                del more
            of_hidden += found
        ctx.gradients = [_joined(of_hidden) if of_hidden else None, *summed]
        ctx.types = [tensor.dtype for tensor in (hidden, *parameters)]
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: torch.Tensor) -> Any:  # type: ignore[override]
        scaled = []
        for gradient, dtype in zip(ctx.gradients, ctx.types, strict=True):
            if gradient is not None:
                local_part(gradient).mul_(scale)
                gradient = gradient.to(dtype)
            scaled.append(gradient)
        return None, None, *scaled


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """The whole of what was cut along the sequence. (Joined as DTensors, parts that are still to be summed over
    ranks would be summed first.)"""
    whole, first = torch.cat([local_part(part) for part in parts], dim=1), parts[0]
    if not isinstance(first, DTensor):
        return whole
    return DTensor.from_local(whole, first.device_mesh, first.placements, run_check=False)
