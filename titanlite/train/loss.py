"""The loss: the mean token loss over the valid tokens of the whole global batch.

Every rank and every micro-batch divides by the same number, so that gradients only need summing,
whatever the mesh, the accumulation, or the spread of the valid tokens.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial

from titanlite.data.loader import MicroBatch
from titanlite.data.packing import IGNORED
from titanlite.errors import UserError
from titanlite.parallel.dtensor import local_part
from titanlite.parallel.tensor_parallel import whole_sequence


def token_loss_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the sum of the cross-entropy over the valid tokens, computed in float32 or wider."""
    if isinstance(logits, DTensor):  # from tensor parallel
        if any(placement.is_shard() for placement in logits.placements):
            return _sharded_loss_sum(logits, labels)
        logits = logits.to_local()
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )


TokenLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Sums the loss over tokens: of logits (batch, tokens, vocabulary) and labels (batch, tokens)."""


def model_loss(
    model: nn.Module,
    batch: MicroBatch,
    inputs: torch.Tensor,
    chunks: int = 1,
    token_loss: TokenLoss = token_loss_sum,
    runs_again: Callable[[], bool] = lambda: False,
) -> torch.Tensor:
    """Return the sum of the token losses of a micro-batch, its sequences cut into `chunks`.

    `inputs` are its tokens, or the hidden states of a pipeline's last stage. A stage may split its
    backward pass into two halves: `runs_again()` is true during the first half.
    """
    if chunks == 1:
        return token_loss(model(inputs, batch.positions, batch.documents), batch.labels)
    head = partial(_loss_in_chunks, batch.labels, chunks, token_loss, runs_again)
    total = model(inputs, batch.positions, batch.documents, head=head)
    if total.dim():
        raise UserError(
            f"training.loss_chunks = {chunks}: {type(model).__name__}.forward does not call its "
            "`head`"
        )
    return total


def _sharded_loss_sum(logits: DTensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the same sum when every rank holds a slice of the vocabulary.

    The logits are not gathered. (torch's loss_parallel() would have to enclose the backward pass as
    well.)
    """
    (rank,) = logits.device_mesh.get_coordinate() or ()

    def all_reduce(values: torch.Tensor, operation: str) -> torch.Tensor:
        placements = (Partial(operation),)
        summed = DTensor.from_local(
            values.detach(), logits.device_mesh, placements, run_check=False
        )
        return summed.full_tensor()

    local = logits.to_local()
    local = local.to(torch.promote_types(local.dtype, torch.float32))
    first = rank * -(-logits.size(-1) // logits.device_mesh.size())
    valid = labels != IGNORED
    is_local = valid & (labels >= first) & (labels < first + local.size(-1))
    index = torch.where(is_local, labels - first, 0).unsqueeze(-1)
    label_logit = local.gather(-1, index).squeeze(-1) * is_local
    top = all_reduce(local.amax(-1), "max")
    sum_exp = (local.detach() - top.unsqueeze(-1)).exp().sum(-1)
    sum_exp, full_label_logit = all_reduce(torch.stack([sum_exp, label_logit]), "sum")
    log_sum_exp = top + sum_exp.log()
    # The value is equal on all ranks and has no gradient. `slope` adds the gradient of this rank's
    # slice, softmax minus one-hot, which needs no communication.
    value = torch.where(valid, log_sum_exp - full_label_logit, 0.0).sum()
    softmax_sum = (local - log_sum_exp.unsqueeze(-1)).exp().sum(-1)
    slope = torch.where(valid, softmax_sum - label_logit, 0.0).sum()
    return value + (slope - slope.detach())


def count_valid(labels: torch.Tensor) -> torch.Tensor:
    """Count the valid tokens, on the device."""
    return (labels != IGNORED).sum()


def _loss_in_chunks(
    labels: torch.Tensor,
    chunks: int,
    token_loss: Callable[..., torch.Tensor],
    runs_again: Callable[[], bool],
    hidden: torch.Tensor,
    output: nn.Module,
) -> torch.Tensor:
    """Return the loss of the last hidden states (batch, tokens, dim), computed chunk by chunk.

    Only one chunk's logits exist at a time. They are computed inside the model's forward pass,
    through its `head`, while FSDP has gathered the output layer's weight.
    """
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

    Forward computes the gradients of a piece right after its loss, so that nothing is computed
    twice, and a piece's logits are freed before the next. Backward only scales the gradients, and
    frees each after its use; the head's are kept in float32.
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
                del gradient  # as large as the weight, so freed before the next logits are computed
            hidden_gradients += gradients  # that of `hidden`, if it is left
        joined = None
        if hidden_gradients:
            joined = _join(hidden_gradients)
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
